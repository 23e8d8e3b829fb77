"""Hands the records of a data set out to the nodes that train on them: record files, and the queue of tasks."""
