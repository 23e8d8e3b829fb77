"""The trainer's own process: `python -m training.trainer` for a task class, `attach` for a user's own loop.

The only part of the program, with `training.tasks`, that imports torch; the daemon starts it and never imports it.
"""
