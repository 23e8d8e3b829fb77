"""Which nodes are in the swarm, and which are alive: a member list with SWIM and Lifeguard failure detection.

May import the flat modules of `overlay` and `overlay.kademlia`. `members` and `failure_detector` decide, and act
through a `Network`; `service` is that network, and runs their timer; `responder` answers requests.
"""
