"""The states of one shard's ownership as immutable tuples, and the names of the rules: see `ownership.model`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

Term = tuple[int, int]
NO_NODE = -1
ZERO: Term = (0, NO_NODE)
Counts = tuple[int, ...]

#: The rules that can be left out.
RULES = {
    "backup_first": "an owner adds only when backup and learner have the delta",
    "recheck": "a backup's acknowledgement counts only for the pair, term and promise under which it was asked",
    "identities": "a delta that is known is not added again",
    "fence": "a forward under a lower term than the highest seen is refused",
    "activation": "a learner outranks no backup before its owner has used the promised term",
    "late_catch_up": "a request for a catch-up that is older than the present attempt is ignored",
    "new_term": "a new backup comes with a new term",
    "drop_raises": "continuing without the backup raises the term",
    "drain": "a hand-over begins when nothing is in flight, and nothing begins during it",
    "successor_first": "an owner that receives its successor's claim before the hand-over's answer becomes its backup",
    "known_count": "a former owner is the new one's backup only if it lacks nothing",
    "fences_survive": "the highest term seen survives a restart",
    "ask_before_yielding": "an owner below a fence asks for that term's owner, and rises above it if there is none",
    "better_copy": "an owner below a fence steps down for the better copy of a dead owner's backup",
    "rise": "an owner raises its term above the fence of a node that asks",
    "above_promises": "a take-over is above the term promised to its node as a learner",
    "best_state": "a take-over continues from the best copy",
    "ask_when_moving": "an owner whose backup crashed during the hand-over surveys the copies before it continues",
    "old_copy": "its copy then ranks by the term under which it last owned",
    "repair": "of two owners the one with the lower term offers its deltas to the other",
    "by_identity": "offered deltas are added by identity, not as a difference",
    "restart_ends_ownership": "an owner that has restarted owns nothing: its backup takes over although it answers",
    "keep_superseded": "a superseded copy is kept until the owner has confirmed its deltas",
    "repair_replicated": "a repaired delta is confirmed only when the backup has it",
}


class Receipt(NamedTuple):
    """A backup's acknowledgement, under the owner's term and last promise then."""

    node: int
    term: Term
    promised: int


class Owned(NamedTuple):
    term: Term
    counts: Counts
    backup: int = NO_NODE
    learner: int = NO_NODE
    promised: int = 0
    moving: Term | None = None
    #: Per delta: None, or the receipts so far of a push in progress.
    pushes: tuple[frozenset[Receipt] | None, ...] = ()

    @property
    def targets(self) -> list[int]:
        return [node for node in (self.backup, self.learner) if node != NO_NODE]


class Backed(NamedTuple):
    owner: int
    term: Term
    counts: Counts | None = None
    promised: Term | None = None
    attempt: int = 0
    buffered: frozenset[int] = frozenset()
    #: The owner's incarnation when it last acted as the owner.
    incarnation: int = 0

    @property
    def is_active(self) -> bool:
        return self.counts is not None and self.promised is None


class Node(NamedTuple):
    alive: bool = True
    fence: Term = ZERO
    incarnation: int = 0
    own: Owned | None = None
    back: Backed | None = None
    #: Deltas to be offered to the owner that this node lost the shard to.
    superseded: frozenset[int] = frozenset()
    #: Ranks of copies gathered for a take-over that has not happened yet.
    survey: tuple[tuple[int, tuple[Any, ...], Term], ...] | None = None
    #: The highest term that this node ever accepted. No rule may read it; the invariants compare with it.
    highest_seen: Term = ZERO


class Message(NamedTuple):
    kind: str
    source: int
    to: int
    term: Term = ZERO
    number: int = 0
    delta: int = 0
    counts: Counts = ()
    taken: bool = True


class State(NamedTuple):
    nodes: tuple[Node, ...]
    messages: frozenset[Message] = frozenset()
    acknowledged: frozenset[int] = frozenset()
    sides: tuple[int, ...] = ()
    #: Events of each kind that may still happen.
    budget: tuple[tuple[str, int], ...] = ()


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Scenario:
    """The start of a search, and the events that may happen. Without `repairs` only the protocol itself helps."""

    name: str
    start: State
    repairs: bool = False
    deltas: int = 1
    depth: int = 9
