"""Map-reduce: lazy data sets in partitions, transformed by functions of the user in one process, several, or a cluster.

`dataset` has the functions that a script calls, `engine` makes data sets and knows where they are computed. A task
runs one stage of one partition (`stages`) at a `backend`. `sources` and `sinks` read and write files.
"""
