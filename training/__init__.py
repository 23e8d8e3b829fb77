"""What is trained and how nodes agree: barriers, shards, exchange, codecs, tasks, and the trainer's two sides.

Only `training.trainer` and `training.tasks` may import torch; a daemon imports neither.
"""
