"""Random histories with faults, each from one seed, and what they conserve: deltas, updates, samples, progress.

Each history has a command that plays many of them, and one again by its seed.
"""
