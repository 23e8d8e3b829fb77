"""Who is in the swarm and who is alive: a member list with SWIM failure detection and Lifeguard's local health.

May import the flat modules of `overlay` and `overlay.kademlia`. Pure: `failure_detector`, `negative_cache`, `members`.
They take events and return actions; `prober` executes the actions.
"""
