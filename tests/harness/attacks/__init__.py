"""Members and strangers that send what the protocol does not foresee, and what the others lose by it.

Full swarms under attack of one member, lies in every field, random values of any type, mutated bytes.
"""
