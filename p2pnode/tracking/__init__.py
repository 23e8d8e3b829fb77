"""Writes the steps of a node to an experiment tracker, in a process of its own: `training.tracker`.

The daemon runs `service`, which sends records to `python -m p2pnode.tracking`; that process runs `writers`. May import
`training`, `overlay` and `p2pnode.config`. Nothing here stops training.
"""
