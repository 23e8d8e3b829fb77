"""Which nodes are in the swarm, and which are alive: a member list with SWIM and Lifeguard failure detection.

May import the flat modules of `overlay` and `overlay.kademlia`. `members` and `failure_detector`, and the small rules
that they use, are pure: events in, `actions` out. `service` connects them to the protocol, performs the actions and
runs the timers; `responder` answers requests.
"""
