"""Engines: ways to run an algorithm of one's own. `mapreduce` transforms data sets partition by partition, run by Dask.

A script asks `p2pnode.engine` for one.
"""
