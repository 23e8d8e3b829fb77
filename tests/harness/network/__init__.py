"""The simulated network below `overlay.transport.Transport`: hosts, requests, lines with a rate, and NATs.

Faults are methods of `Network`, and all chance comes from its seed.
"""
