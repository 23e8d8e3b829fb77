"""Map-reduce: lazy data sets in partitions, transformed by functions of the user, and run by Dask.

`dataset` has the functions that a script calls, `engine` makes data sets and knows where they are computed. An action
becomes a graph of tasks (`plan`); a task runs one stage of one partition (`stages`), and `scheduler` gives the graph to
Dask: in this process, in processes of this machine, or on a cluster. `sources` and `sinks` read and write files.
"""
