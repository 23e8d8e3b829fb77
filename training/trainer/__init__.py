"""The trainer process: `python -m training.trainer` for a task class, `attach` for a user's own loop.

Only this package and `training.tasks` import torch. The daemon starts the process and never imports them.
"""
