"""The secure channel of a closed swarm: swarm key, invitations, handshake, sealed datagrams, admission tickets, TLS.

May import the flat modules of `overlay`; `sealed_transport` wraps any transport. All are pure but `sealed_transport`,
`certificate_request`, `certificate_maker` and `tls`. Nothing here decides who is a member beyond holding the key.
"""
