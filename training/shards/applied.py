"""The set of applied deltas of a shard, by identity, and what it no longer lists and would take for unknown.

An identity that was applied and is not listed any more must not be applied again, and nobody can tell it from one that
never came. So a set remembers, in a few numbers, which identities it may have forgotten; an owner refuses those.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Container, Iterable, Iterator
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


#: A row of so many ranges takes about 60 bytes in a message; of one, 35.
RANGES_PER_ROW = 4


class DeltaId(NamedTuple):
    """The identity of a delta: applied once, however often it is sent."""

    node: bytes
    incarnation: int
    step: int


class Applied:
    """A set of identities: per (node, incarnation) a few disjoint ranges of steps.

    After a split, step 6 of a node may be in and its step 5 not; hence ranges. Beyond `MAX_RANGES` the lowest gap is
    closed: a delta that old was refused as late long before. What `forgotten` says is not listed any more.
    """

    MAX_RANGES = 32
    #: Those of a sum or a difference of sets: as many as a message may have.
    MAX_MERGED = 64
    #: Incarnations listed per node; the lowest is forgotten first, for a node that started so often pushes it no more.
    MAX_INCARNATIONS = 64

    def __init__(
        self,
        ranges: dict[tuple[bytes, int], list[tuple[int, int]]] | None = None,
        forgotten: Forgotten | None = None,
    ) -> None:
        self._ranges = ranges if ranges is not None else {}
        self.forgotten = forgotten if forgotten is not None else Forgotten()

    def __contains__(self, identity: DeltaId) -> bool:
        ranges = self._ranges.get((identity.node, identity.incarnation))
        if not ranges:
            return False
        if identity.step > ranges[-1][1]:  # nearly always: the next step of its node
            return False
        place = bisect_right(ranges, (identity.step, identity.step)) - 1
        if place >= 0 and ranges[place][0] <= identity.step <= ranges[place][1]:
            return True
        following = place + 1
        return following < len(ranges) and ranges[following][0] <= identity.step <= ranges[following][1]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Applied):
            return NotImplemented
        return self._ranges == other._ranges and self.forgotten == other.forgotten

    __hash__ = None  # type: ignore[assignment]  # it changes

    def add(self, identity: DeltaId) -> None:
        """Add an identity; a second time changes nothing."""
        ranges = self._ranges.get((identity.node, identity.incarnation))
        if ranges is None:
            ranges = self._ranges[identity.node, identity.incarnation] = []
            starts = sorted(incarnation for node, incarnation in self._ranges if node == identity.node)
            for incarnation in starts[: -self.MAX_INCARNATIONS]:
                if incarnation != identity.incarnation:
                    self.forget(identity.node, incarnation)
            if identity.step < self.forgotten.before:
                # It was on its way when its node was forgotten: others of this start may have been listed.
                self.forgotten.note_start(identity.node, identity.incarnation, identity.step, 0)
        if ranges and identity.step == ranges[-1][1] + 1:  # nearly always
            ranges[-1] = (ranges[-1][0], identity.step)
            return
        if identity in self:
            return
        insort(ranges, (identity.step, identity.step))
        merged: list[tuple[int, int]] = []
        for low, high in ranges:
            if merged and low <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(merged[-1][1], high))
            else:
                merged.append((low, high))
        while len(merged) > self.MAX_RANGES:
            merged[:2] = [(merged[0][0], merged[1][1])]
        ranges[:] = merged

    def last(self, node: bytes, incarnation: int) -> int:
        """The highest step of one incarnation; -1 where there is none."""
        ranges = self._ranges.get((node, incarnation))
        return ranges[-1][1] if ranges else -1

    def forget(self, node: bytes, incarnation: int) -> None:
        """Do not list one incarnation of a node any more, nor take up a lower one that is not listed."""
        if ranges := self._ranges.pop((node, incarnation), None):
            self.forgotten.note_start(node, incarnation, ranges[-1][1], _length(ranges))

    def forget_nodes(self, nodes: Container[bytes]) -> None:
        """Do not list these nodes any more; nor take up a step, of any node that is not listed, up to their last."""
        kept: dict[tuple[bytes, int], list[tuple[int, int]]] = {}
        for key, ranges in self._ranges.items():
            if key[0] in nodes:
                self.forgotten.note_node(key[0], ranges[-1][1], _length(ranges))
            else:
                kept[key] = ranges
        self._ranges = kept

    def may_have_forgotten(self, identity: DeltaId) -> bool:
        """Whether an identity that is not listed may have been: nobody can tell, so it must not be applied."""
        forgotten = self.forgotten
        if not (forgotten.floors or forgotten.before or forgotten.count) or identity in self:
            return False
        return identity.step < self._unlisted_below((identity.node, identity.incarnation))

    def _unlisted_below(self, key: tuple[bytes, int]) -> float:
        """The steps below this of one (node, incarnation) that are not listed may be forgotten."""
        if not self.forgotten:
            return 0
        ranges = self._ranges.get(key)
        return self.forgotten.below(*key, ranges[0][0] if ranges else None)

    def copy(self) -> Applied:
        return Applied({key: list(ranges) for key, ranges in self._ranges.items()}, self.forgotten.copy())

    def without(self, other: Applied) -> Applied:
        """The identities listed in this set that the other neither lists nor may have forgotten."""
        left: dict[tuple[bytes, int], list[tuple[int, int]]] = {}
        for key, ranges in self._ranges.items():
            rest = _from(other._unlisted_below(key), ranges)
            for low, high in other._ranges.get(key, ()):
                cut = [((a, min(b, low - 1)), (max(a, high + 1), b)) for a, b in rest]
                rest = [piece for pieces in cut for piece in dict.fromkeys(pieces) if piece[0] <= piece[1]]
            if rest:
                left[key] = rest
        return Applied(left)

    @property
    def row_count(self) -> int:
        """How many rows describe the set, of what is listed and of what is forgotten: a measure of the size of a
        message. One of many ranges counts as several."""
        return rows_like(self._ranges.values()) + len(self.forgotten.floors)

    def count(self) -> int:
        """The number of identities, forgotten ones included."""
        return self.forgotten.count + sum(map(_length, self._ranges.values()))

    def merge(self, other: Applied) -> None:
        """Add all identities that the other set lists. Beyond `MAX_MERGED` ranges the lowest gaps are closed."""
        for key, theirs in other._ranges.items():
            merged: list[tuple[int, int]] = []
            for low, high in sorted([*self._ranges.get(key, ()), *theirs]):
                if merged and low <= merged[-1][1] + 1:
                    merged[-1] = (merged[-1][0], max(merged[-1][1], high))
                else:
                    merged.append((low, high))
            if len(merged) > self.MAX_MERGED:
                first = len(merged) - self.MAX_MERGED
                merged[: first + 1] = [(merged[0][0], merged[first][1])]
            self._ranges[key] = merged

    def rows(self) -> list[tuple[bytes, int, list[tuple[int, int]]]]:
        """What is listed as plain data, for the wire."""
        return [(node, incarnation, list(ranges)) for (node, incarnation), ranges in self._ranges.items()]

    def iterate(self) -> Iterator[tuple[bytes, int, list[tuple[int, int]]]]:
        """As `rows`, without copies: for reading, while nothing is changed."""
        return ((node, incarnation, ranges) for (node, incarnation), ranges in self._ranges.items())

    @classmethod
    def of_rows(
        cls, rows: list[tuple[bytes, int, list[tuple[int, int]]]], forgotten: Forgotten | None = None
    ) -> Applied:
        """The set of rows, which need not be in order: they may come from another node, or from a disk."""
        found = cls(forgotten=forgotten)
        others: dict[tuple[bytes, int], list[tuple[int, int]]] = {}
        for node, incarnation, ranges in rows:
            if (node, incarnation) not in found._ranges and _is_in_order(ranges):  # nearly always
                found._ranges[node, incarnation] = list(ranges)
            elif whole := [(low, high) for low, high in ranges if low <= high]:
                others.setdefault((node, incarnation), []).extend(whole)
        found.merge(cls(others))  # once: each merge of a key sorts all its ranges
        return found


def rows_like(rows: Iterable[list[tuple[int, int]]]) -> int:
    """How many rows of at most `RANGES_PER_ROW` ranges take as much in a message as these."""
    return sum([1 + len(ranges) // RANGES_PER_ROW for ranges in rows])


def _length(ranges: list[tuple[int, int]]) -> int:
    """How many steps ranges have."""
    return sum(high - low + 1 for low, high in ranges)


def _from(step: float, ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The part of ranges from a step on."""
    return [(low if low >= step else int(step), high) for low, high in ranges if high >= step]


def _is_in_order(ranges: list[tuple[int, int]]) -> bool:
    """Whether ranges are as a set keeps them: none empty, in order, and with gaps between them."""
    last = -2
    for low, high in ranges:
        if not last + 1 < low <= high:
            return False
        last = high
    return 0 < len(ranges) <= Applied.MAX_MERGED
