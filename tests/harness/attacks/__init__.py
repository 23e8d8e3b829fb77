"""Members and strangers that send what the protocol does not foresee: random values of any type, mutated bytes."""
