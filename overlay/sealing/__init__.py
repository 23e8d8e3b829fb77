"""The secure channel of a closed swarm: swarm key, invitations, handshake, sealed datagrams, admission tickets, TLS.

May import the flat modules of `overlay`; `sealed_transport` wraps any transport. All are pure but `sealed_transport`,
`certificate_maker` and `tls`. A node is a member if it has the swarm key.
"""
