"""Several trainers under one daemon, one per device: what each does next, and how their deltas become the host's one.

The daemon's side; imports no torch. docs/devices.md describes it.
"""
