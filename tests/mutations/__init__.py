"""Deliberate faults in the exchange, each with the test that must fail under it.

`table` lists them, `python -m tests.mutations` (`make mutations`) applies one after the other to a copy of the tree and
runs its test. docs/faults.md has the same table.
"""
