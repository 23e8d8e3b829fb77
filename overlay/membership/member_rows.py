"""What the failure detector knows of its members: one row of numbers each, 60 bytes beside the id.

A member is read and changed through a `Member`, which is made when one is asked for. An object for every member, with
its own numbers, takes three times as much. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from overlay.kademlia.messages import MemberState

#: No leave or refutation was reported.
NOTHING_REPORTED = (-1, -1, -1)
_STATES = tuple(MemberState)


@dataclass(slots=True)
class Member:
    """What is known of one node. `heard`: when its last own message arrived; `since`: when its state changed."""

    state: MemberState
    incarnation: int
    refutation: int
    heard: float
    since: float
    deadline: float = 0.0
    probed: float = float("-inf")
    #: Calls in a row that it left unanswered, each with its retry.
    missed: int = 0
    #: Suspected, and others report that it is dead: this node's own probes decide.
    reported_dead: bool = False
    #: The newest leave or refutation that others reported: incarnation, refutation, kind.
    unconfirmed_update: tuple[int, int, int] = NOTHING_REPORTED

    def rank(self) -> tuple[int, int, int]:
        return (self.incarnation, self.refutation, min(self.state, MemberState.DEAD))


class MemberRows:
    """The members by id, in the order in which they were added."""

    def __init__(self) -> None:
        self._rows: dict[bytes, int] = {}
        self._free: list[int] = []
        self.states = bytearray()
        self.reported_dead = bytearray()
        self.incarnations = array("Q")
        self.refutations = array("Q")
        self.missed = array("L")
        self.heard = array("d")
        self.since = array("d")
        self.deadlines = array("d")
        self.probed = array("d")
        self.unconfirmed: dict[int, tuple[int, int, int]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._rows)

    def __contains__(self, node_id: object) -> bool:
        return node_id in self._rows

    def get(self, node_id: bytes) -> Member | None:
        row = self._rows.get(node_id)
        return None if row is None else _Row(self, row)

    def __getitem__(self, node_id: bytes) -> Member:
        return _Row(self, self._rows[node_id])

    def add(self, node_id: bytes, incarnation: int, now: float, *, refutation: int = 0) -> None:
        """A member that is alive, and was heard of now."""
        row = self._free.pop() if self._free else self._append_row()
        self._rows[node_id] = row
        first = Member(MemberState.ALIVE, incarnation, refutation, now, now)
        member = _Row(self, row)
        for field in fields(Member):
            setattr(member, field.name, getattr(first, field.name))

    def _append_row(self) -> int:
        for small in (self.states, self.reported_dead):
            small.append(0)
        for numbers in (self.incarnations, self.refutations, self.missed):
            numbers.append(0)
        for times in (self.heard, self.since, self.deadlines, self.probed):
            times.append(0.0)
        return len(self.heard) - 1

    def remove(self, node_id: bytes) -> Member | None:
        """Remove a member and return a copy of what was known, if it was one."""
        row = self._rows.pop(node_id, None)
        if row is None:
            return None
        member = _Row(self, row)
        last = Member(**{field.name: getattr(member, field.name) for field in fields(Member)})
        self.unconfirmed.pop(row, None)
        self._free.append(row)
        return last

    def set_unconfirmed(self, row: int, update: tuple[int, int, int]) -> None:
        """Rare, so it is no column."""
        if update == NOTHING_REPORTED:
            self.unconfirmed.pop(row, None)
        else:
            self.unconfirmed[row] = update


def _column(name: str) -> Any:
    def read(member: _Row) -> Any:
        return getattr(member.table, name)[member.row]

    def write(member: _Row, value: Any) -> None:
        getattr(member.table, name)[member.row] = value

    return property(read, write)


class _Row(Member):
    """A member as its row is now."""

    __slots__ = ("row", "table")

    def __init__(self, table: MemberRows, row: int) -> None:
        self.table = table
        self.row = row

    state: Any = property(
        lambda member: _STATES[member.table.states[member.row]],
        lambda member, state: member.table.states.__setitem__(member.row, state),
    )
    unconfirmed_update: Any = property(
        lambda member: member.table.unconfirmed.get(member.row, NOTHING_REPORTED),
        lambda member, update: member.table.set_unconfirmed(member.row, update),
    )
    reported_dead: Any = _column("reported_dead")
    incarnation: Any = _column("incarnations")
    refutation: Any = _column("refutations")
    missed: Any = _column("missed")
    heard: Any = _column("heard")
    since: Any = _column("since")
    deadline: Any = _column("deadlines")
    probed: Any = _column("probed")
