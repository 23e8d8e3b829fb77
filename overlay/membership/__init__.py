"""Who is in the swarm and who is alive: a member list with SWIM failure detection and Lifeguard's local health.

May import the flat modules of `overlay` and `overlay.kademlia`. `failure_detector`, `negative_cache` and `members`
take events and return actions; `prober` executes the actions.
"""
