"""Engines: ways to run an algorithm of one's own. `mapreduce` transforms data sets partition by partition.

A script asks `p2pnode.engine` for one.
"""
