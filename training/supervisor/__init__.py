"""The daemon's side of the trainer process: starts and ends it, exchanges messages with it, and keeps its output.

May import `training.trainer_link` and the settings; never torch. The other side is `training.trainer`.
"""
