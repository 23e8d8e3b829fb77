"""One deliberate fault: the change of a source, and the test that must fail then."""

from __future__ import annotations

from typing import NamedTuple


class Change(NamedTuple):
    """In `file`, the text `old`, which occurs once, becomes `new`."""

    file: str
    old: str
    new: str


class Mutation(NamedTuple):
    """A deliberate fault. `part` is the role whose code has it; `test` is a pytest node id."""

    part: str
    fault: str
    test: str
    changes: tuple[Change, ...]

    def row(self) -> str:
        """Its row of the table in docs/faults.md."""
        path, _, name = self.test.partition("::")
        where = f"`{name}` in " if name else ""
        return f"| {self.part} | {self.fault} | {where}`{path}` |"
