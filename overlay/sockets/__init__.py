"""The real transport: UDP datagrams, and streams over TCP or TLS, on one port number.

May import the flat modules of `overlay` and `overlay.sealing`. Only the composition root of the daemon imports it.
`transport` composes `listener`, `client` and `server`; the tests put a simulated network in its place.
"""
