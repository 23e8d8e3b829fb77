"""Figures of this program, each measured by a command: `python -m benchmarks`; see `benchmarks.__main__`."""
