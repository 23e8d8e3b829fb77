"""What the failure detector knows of its members: one row of numbers each, 22 bytes beside the id.

A member is read and changed through a `Member`, which is made when one is asked for. What is said of a few only, as of
those that are suspected, is kept for these alone. An object for every member, with its own numbers, takes eight times
as much. The dictionary from ids to rows is one with that of the peers (`overlay.row_index`). Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from p2pnode.overlay.kademlia.messages import MemberState
from p2pnode.overlay.row_index import RowIndex

#: No leave or refutation was reported.
NOTHING_REPORTED = (-1, -1, -1)
#: Counted up to here: what is decided by it needs three.
MOST_MISSED = 255


@dataclass(slots=True)
class Member:
    """What is known of one node. `heard`: when its last own message arrived. `since`: when it was suspected, or
    removed; of one that is alive 0."""

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


@dataclass(slots=True)
class _Trouble:
    """What is known only of members that are suspected, or of which an accusation or a leave was reported."""

    state: MemberState = MemberState.ALIVE
    refutation: int = 0
    since: float = 0.0
    deadline: float = 0.0
    reported_dead: bool = False
    unconfirmed_update: tuple[int, int, int] = NOTHING_REPORTED


#: Read of members without trouble, and never written.
_NONE = _Trouble()


class MemberRows:
    """The members by id, in the order in which they were added."""

    def __init__(self) -> None:
        self.index = RowIndex()
        self._rows = self.index.rows
        self._is_member = bytearray()  # a row that is not may be of the other table alone
        self._members = 0
        self.incarnations = array("I")  # wider once one needs it
        self.heard = array("d")
        self.probed = array("d")
        self.missed = bytearray()
        self.troubles: dict[int, _Trouble] = {}

    def __len__(self) -> int:
        return self._members

    def __iter__(self) -> Iterator[bytes]:
        return iter([node_id for node_id in self._rows if self._row(node_id) is not None])

    def __contains__(self, node_id: object) -> bool:
        return isinstance(node_id, bytes) and self._row(node_id) is not None

    def get(self, node_id: bytes) -> Member | None:
        row = self._row(node_id)
        return None if row is None else _Row(self, row)

    def __getitem__(self, node_id: bytes) -> Member:
        row = self._row(node_id)
        if row is None:
            raise KeyError(node_id)
        return _Row(self, row)

    def _row(self, node_id: bytes) -> int | None:
        row = self._rows.get(node_id)
        return row if row is not None and row < len(self._is_member) and self._is_member[row] else None

    def add(self, node_id: bytes, incarnation: int, now: float, *, refutation: int = 0) -> None:
        """A member that is alive, and was heard of now."""
        row = self.index.take(node_id)
        while row >= len(self.heard):
            self._append_row()
        self._is_member[row] = True
        self._members += 1
        self.note_incarnation(row, incarnation)
        self.heard[row], self.probed[row] = now, float("-inf")
        self.missed[row] = 0
        if refutation:
            self.troubles[row] = _Trouble(refutation=refutation)

    def _append_row(self) -> None:
        self._is_member.append(0)
        self.incarnations.append(0)
        self.heard.append(0.0)
        self.probed.append(0.0)
        self.missed.append(0)

    def remove(self, node_id: bytes) -> Member | None:
        """Remove a member and return a copy of what was known, if it was one."""
        row = self._row(node_id)
        if row is None:
            return None
        member = _Row(self, row)
        last = Member(**{field.name: getattr(member, field.name) for field in fields(Member)})
        self.troubles.pop(row, None)
        self._is_member[row] = False
        self._members -= 1
        self.index.release(node_id)
        return last

    def heard_again(self, node_id: bytes, incarnation: int, now: float) -> bool:
        """A message of it has arrived: true if that says all, for a member without trouble since the same start."""
        row = self._row(node_id)
        if row is None or row in self.troubles or self.incarnations[row] != incarnation:
            return False
        self.heard[row] = now
        self.missed[row] = 0
        return True

    def note_incarnation(self, row: int, incarnation: int) -> None:
        """A member's incarnation: four bytes, until one needs eight."""
        try:
            self.incarnations[row] = incarnation
        except OverflowError:
            self.incarnations = array("Q", self.incarnations)
            self.incarnations[row] = incarnation

    def note(self, row: int, name: str, value: Any) -> None:
        """One field of a member's trouble; one that is over is forgotten."""
        trouble = self.troubles.get(row)
        if trouble is None:
            if value == getattr(_NONE, name):
                return
            trouble = self.troubles[row] = _Trouble()
        setattr(trouble, name, value)
        if trouble.state is MemberState.ALIVE:
            trouble.since = trouble.deadline = 0.0
            if trouble == _NONE:
                del self.troubles[row]


def _column(name: str) -> Any:
    def read(member: _Row) -> Any:
        return getattr(member.table, name)[member.row]

    def write(member: _Row, value: Any) -> None:
        getattr(member.table, name)[member.row] = value

    return property(read, write)


def _trouble(name: str) -> Any:
    def read(member: _Row) -> Any:
        return getattr(member.table.troubles.get(member.row, _NONE), name)

    def write(member: _Row, value: Any) -> None:
        member.table.note(member.row, name, value)

    return property(read, write)


class _Row(Member):
    """A member as its row is now."""

    __slots__ = ("row", "table")

    def __init__(self, table: MemberRows, row: int) -> None:
        self.table = table
        self.row = row

    incarnation: Any = property(
        lambda member: member.table.incarnations[member.row],
        lambda member, incarnation: member.table.note_incarnation(member.row, incarnation),
    )
    heard: Any = _column("heard")
    probed: Any = _column("probed")
    missed: Any = property(
        lambda member: member.table.missed[member.row],
        lambda member, missed: member.table.missed.__setitem__(member.row, min(missed, MOST_MISSED)),
    )
    state: Any = _trouble("state")
    refutation: Any = _trouble("refutation")
    since: Any = _trouble("since")
    deadline: Any = _trouble("deadline")
    reported_dead: Any = _trouble("reported_dead")
    unconfirmed_update: Any = _trouble("unconfirmed_update")
