"""Datagram RPC and routing, by the `kademlia` package, subclassed: messages, routing table, lookups, identity proofs.

May import the flat modules of `overlay`. `routing_table`, `lookup` and `messages` are pure. `calls` holds what
waits for answers; `protocol` sends and receives.
"""
