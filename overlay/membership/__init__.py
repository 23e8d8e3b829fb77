"""Who is in the swarm and who is alive: a member list with SWIM failure detection and Lifeguard's local health.

May import the flat modules of `overlay` and `overlay.kademlia`. `failure_detector`, `members`, `identity_conflict`,
`negative_cache` and `verification_limit` are pure rules: events in, `actions` out. `service` connects them to the
protocol and performs the actions, `prober` runs the timers, `responder` answers requests.
"""
