"""Writes the steps of a node to an experiment tracker, in a thread of its own: `training.tracker`.

The daemon runs `service`, which hands records to a writer of `writers` in that thread. May import `training`, `overlay`
and `p2pnode.config`. Nothing here stops training.
"""
