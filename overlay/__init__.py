"""Finds and tracks peers: identity, Kademlia routing, SWIM failure detection, sampling, placement, transport.

The package knows nothing of training. Its rules are plain synchronous code that gets time and randomness passed in;
`overlay.overlay.Overlay` composes the services that run them. The flat modules are the base of the packages below.
"""
