"""Looks at the deltas of a run for mistakes of its script: the same data on two nodes, weights that hardly change."""
