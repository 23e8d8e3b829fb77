"""Getting into a swarm and back into it: bootstrap addresses, stored peers, peers of the local network.

May import the flat modules of `overlay`, `overlay.kademlia`, `overlay.membership` and `overlay.discovery`. `hello` is
the first exchange with a node, `dialer` tries addresses, `joining` joins, rejoins and heals partitions.
"""
