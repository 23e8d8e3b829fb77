"""The simulated environment of a node: an event loop with virtual time, clock, entropy, disk, executor, log and store.

Also what makes many nodes in one process cheap (`quick_identity`), and what counts turns of the loop.
"""
