"""The peer-to-peer engine: each node schedules, pushes and waits at its own barrier; owners of keys pull.

`loop` is the order of the verbs, `engine` what a script uses.
"""
