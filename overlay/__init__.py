"""Finding and knowing peers: ids, identity, the Kademlia table, population, sampling, liveness, placement, transport.

This package knows nothing of training. Its rules (routing, estimators, samplers, liveness, placement) are plain
synchronous code with the clock and the randomness passed in; `overlay.overlay.Overlay` is the service that runs them.
"""
