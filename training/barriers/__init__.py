"""When a node may begin its next step: the predicates (pure) and the waiter that applies them to sampled peers.

May import `overlay` and the settings. The barrier methods are asp, bsp, ssp, pbsp and pssp (docs/psp.md).
"""
