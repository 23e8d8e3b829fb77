"""The set of applied deltas of a shard, by identity, and the steps that it no longer lists.

A set lists one row per start of a node: (node, incarnation) and ranges of steps. A window of steps, as the anti-replay
window of IPsec, would not do: after a split the origins push to the other side's owner at once, far ahead of what the
repair still brings. The set keeps the `MAX_STARTS` rows that were added to last. Of a row that it drops the steps may
have been applied or not. So an owner refuses a step up to that, of every start that is not listed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

#: First and last step.
Range = tuple[int, int]
#: node, incarnation, ranges: a row on the wire and on disk.
Row = tuple[bytes, int, list[Range]]


class DeltaId(NamedTuple):
    """The identity of a delta: applied once, however often it is sent."""

    node: bytes
    incarnation: int
    step: int


class Applied:
    """A set of identities. Of a start that is not listed, the steps below `before` may be in it."""

    #: Starts of nodes, of about 40 bytes each in a message. A swarm has a few hundred nodes at a time.
    MAX_STARTS = 8192
    #: Ranges of a row: as many as a message may have. Beyond them the lowest gap closes, and counts as applied.
    MAX_RANGES = 64

    def __init__(self) -> None:
        #: The row that was added to last comes last.
        self._rows: dict[tuple[bytes, int], list[Range]] = {}
        self.before = 0

    def __contains__(self, identity: DeltaId) -> bool:
        ranges = self._rows.get((identity.node, identity.incarnation))
        if not ranges or identity.step > ranges[-1][1]:  # nearly always: the next step of its node
            return False
        return any(low <= identity.step <= high for low, high in ranges)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Applied):
            return NotImplemented
        return self._rows == other._rows and self.before == other.before

    __hash__ = None  # type: ignore[assignment]  # it changes

    def add(self, identity: DeltaId) -> None:
        """Add an identity; a second time changes nothing."""
        key, step = (identity.node, identity.incarnation), identity.step
        ranges = self._rows[key] = self._rows.pop(key, [])
        if ranges and step > ranges[-1][1]:  # nearly always
            if step == ranges[-1][1] + 1:
                ranges[-1] = (ranges[-1][0], step)
            else:
                ranges.append((step, step))
            if len(ranges) > self.MAX_RANGES:
                ranges[:2] = [(ranges[0][0], ranges[1][1])]
        elif identity not in self:
            # One that was on its way while its row was dropped: what was in that row counts as applied.
            below = self._unlisted_below(key)
            ranges[:] = self._union([*ranges, (0, below - 1) if step < below else (step, step)])
            if len(self._rows) > self.MAX_STARTS:
                dropped = self._rows.pop(next(iter(self._rows)))
                self.before = max(self.before, dropped[-1][1] + 1)

    def may_have_forgotten(self, identity: DeltaId) -> bool:
        """Whether an identity that is not listed may have been: nobody can tell, so it must not be applied."""
        return identity.step < self._unlisted_below((identity.node, identity.incarnation)) and identity not in self

    def _unlisted_below(self, key: tuple[bytes, int]) -> int:
        """The steps below this of one start may have been in a row that was dropped. A row that began anew lists all
        from its first step on."""
        ranges = self._rows.get(key)
        return min(self.before, ranges[0][0]) if ranges else self.before

    def last(self, node: bytes, incarnation: int) -> int:
        """The highest step of one start; -1 where there is none."""
        ranges = self._rows.get((node, incarnation))
        return ranges[-1][1] if ranges else -1

    def copy(self) -> Applied:
        found = Applied()
        found._rows = {key: list(ranges) for key, ranges in self._rows.items()}
        found.before = self.before
        return found

    def merge(self, other: Applied) -> None:
        """Add all identities that the other set lists."""
        for key, theirs in other._rows.items():
            self._rows[key] = self._union([*self._rows.get(key, ()), *theirs])
        self.before = max(self.before, other.before)

    def without(self, other: Applied) -> Applied:
        """The identities listed in this set that the other neither lists nor may have forgotten."""
        left = Applied()
        for key, ranges in self._rows.items():
            rest = ranges
            for low, high in [(0, other._unlisted_below(key) - 1), *other._rows.get(key, ())]:
                cut = [
                    piece
                    for first, last in rest
                    for piece in ((first, min(last, low - 1)), (max(first, high + 1), last))
                ]
                rest = [(first, last) for first, last in cut if first <= last]
            if rest:
                left._rows[key] = rest
        return left

    def count(self) -> int:
        """How many identities are listed."""
        return sum(high - low + 1 for ranges in self._rows.values() for low, high in ranges)

    def rows(self) -> list[Row]:
        """What is listed as plain data, for the wire."""
        return [(node, incarnation, list(ranges)) for (node, incarnation), ranges in self._rows.items()]

    @classmethod
    def of_rows(cls, rows: Iterable[Row], before: int = 0) -> Applied:
        """The set of rows, which need not be in order: they may come from another node, or from a disk."""
        found = cls()
        found.before = before
        for node, incarnation, ranges in rows:
            if whole := [(low, high) for low, high in ranges if low <= high]:
                former = found._rows.get((node, incarnation), [])
                found._rows[node, incarnation] = cls._union([*former, *whole])
        return found

    @classmethod
    def _union(cls, ranges: list[Range]) -> list[Range]:
        """Ranges in order and with gaps between them, as a row has them."""
        found: list[Range] = []
        for low, high in sorted(ranges):
            if found and low <= found[-1][1] + 1:
                found[-1] = (found[-1][0], max(found[-1][1], high))
            else:
                found.append((low, high))
        if (excess := len(found) - cls.MAX_RANGES) > 0:
            found[: excess + 1] = [(found[0][0], found[excess][1])]
        return found
