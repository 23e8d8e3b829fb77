"""What a set of identities no longer lists, and would take for unknown. Pure.

An identity that was applied and is not listed any more must not be applied again, and nobody can tell it from one that
never came. So a set remembers, in a few numbers, which identities it may have forgotten; an owner refuses those.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

#: What fits a message. No run comes so far, but a message of another node may say so.
LARGEST = (1 << 48) - 1


class Floor(NamedTuple):
    """Of one node: its starts below `incarnation` may be forgotten; their steps were below `step`."""

    incarnation: int
    step: int


@dataclass(slots=True)
class Forgotten:
    """`floors` are of nodes that have started again since. `before` is for nodes without any row: their steps below it
    may be forgotten. `count` identities are."""

    floors: dict[bytes, Floor] = field(default_factory=dict)
    before: int = 0
    count: int = 0

    def __bool__(self) -> bool:
        return bool(self.floors or self.before or self.count)

    def copy(self) -> Forgotten:
        return Forgotten(dict(self.floors), self.before, self.count)

    def below(self, node: bytes, incarnation: int, first: int | None) -> float:
        """Steps below this may be forgotten where they are not listed; `first` is the lowest step that is, if any.

        A row that was forgotten as a whole ended below `before`. One that began anew began at `before` or above: what
        is listed from its first step on is all that there was.
        """
        if (floor := self.floors.get(node)) is not None and incarnation < floor.incarnation:
            return math.inf
        return self.before if first is None else min(self.before, first)

    def note_start(self, node: bytes, incarnation: int, last: int, count: int) -> None:
        """One start of a node is not listed any more; its last step, and how many identities it had."""
        former = self.floors.get(node, Floor(0, 0))
        incarnation, step = min(incarnation + 1, LARGEST), min(last + 1, LARGEST)
        self.floors[node] = Floor(max(former.incarnation, incarnation), max(former.step, step))
        self.count += count

    def note_node(self, node: bytes, last: int, count: int) -> None:
        """Nothing of a node is listed any more; its last step, and how many identities were listed until now."""
        self.before = max(self.before, min(last + 1, LARGEST), self.floors.pop(node, Floor(0, 0)).step)
        self.count += count

    def last_of(self, node: bytes) -> int:
        """The last step of the forgotten starts of a node; -1 if there are none."""
        return self.floors.get(node, Floor(0, 0)).step - 1

    def rows(self) -> list[tuple[bytes, int, int]]:
        """The floors as plain data, for the wire."""
        return [(node, *floor) for node, floor in self.floors.items()]

    @classmethod
    def of_rows(cls, rows: list[tuple[bytes, int, int]], before: int, count: int) -> Forgotten:
        return cls({node: Floor(incarnation, step) for node, incarnation, step in rows}, before, count)
