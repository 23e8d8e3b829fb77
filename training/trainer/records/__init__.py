"""The trainer's side of dispatched records: `swarm.records` for scripts, and batches for task classes.

`task_source` asks the daemon for tasks, or takes this node's own; `record_draws` reads their records and counts what is
trained. Both need no torch.
"""
