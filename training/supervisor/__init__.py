"""The daemon's side of the trainer process: starts it, talks to it, restarts it, and keeps its output.

May import `training.trainer_link` and the settings; never torch. The other side is `training.trainer`.
"""
