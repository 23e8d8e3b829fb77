"""Whether others can connect to this node, and making it so: dial-back checks (AutoNAT) and port mapping (UPnP).

May import the flat modules of `overlay` and `overlay.bootstrap`. `upnp` is the only module that talks to a router.
"""
