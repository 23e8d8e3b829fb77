"""Files that hold secrets: swarm keys, invitations, the API token; and sealing a transport with them.

May import `overlay` and `p2pnode.config`.
"""
