"""One node from start to exit: composition, startup, the end of a run, checkpoints.

May import `training`, `overlay` and `p2pnode.config`; not the status API, which observes the node from outside.
"""
