"""Files that hold secrets (swarm keys, invitations, the API token), and the transport of a closed swarm.

May import `overlay` and `p2pnode.config`.
"""
