"""How many nodes there are, a uniform sample of them, and which of them may own a key.

May import the flat modules of `overlay`, `overlay.kademlia` and `overlay.membership`. `population`, `sampling`
and `placement` are pure. `peer_sampling` and `lookup_service` run the lookups that feed them.
"""
