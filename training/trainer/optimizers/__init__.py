"""Optimisers and the schedules of their rates: steps that are counted, positions and copies that follow the weights."""
