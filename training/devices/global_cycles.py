"""The global server of leader SGD: divides the local steps of each cycle among the trainers of all nodes. Pure.

A cycle has W · period local steps, where W trainers take part, and after them each trainer takes one distributed step.
Nodes lease a few steps at a time, and ask for more as their trainers come to need them. So a fast node takes more of a
cycle than a slow one. Each trainer has one step of its own. A node for which nothing is left is told so at once, also
while others have not come to this cycle. The barrier of the swarm decides who waits for whom, not this server.

Requests and answers count the steps of the whole cycle. So a repeated request has the answer that it had, and another
server can go on from the counts of the nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pnode.overlay.peers import Counter, Id
from p2pnode.training.devices.gpus import MAX_DEVICES

#: Cycles that are remembered; one that asks for an older one has its own share.
CYCLES_KEPT = 256


Genesis = Annotated[bytes, Meta(max_length=16)]
#: No cycle has so many steps.
Steps = Annotated[int, Meta(ge=0, lt=1 << 32)]


class LeaseSteps(msgspec.Struct, frozen=True, array_like=True):
    """Asks for `wants` more local steps of a cycle, in which `trainers` of this node take part with a period of
    `period`. `taken` and `total`: what this node, and all nodes, have leased of it, as the last answer said. `loss`:
    the running loss of this node's leader; None where it follows none."""

    genesis: Genesis
    cycle: Counter
    trainers: Annotated[int, Meta(ge=1, le=MAX_DEVICES)]
    period: Annotated[int, Meta(ge=1, lt=1 << 24)]
    taken: Steps
    total: Steps
    wants: Annotated[int, Meta(ge=0, le=MAX_DEVICES)]
    loss: float | None = None


class StepsLeased(msgspec.Struct, frozen=True, array_like=True):
    """Of the cycle the node may take `allowed` steps in all, and no more if `is_closed`. `leader`: the node whose
    leader has the lowest loss; None: none has one yet."""

    cycle: Counter
    allowed: Steps
    is_closed: bool
    total: Steps
    leader: Id | None = None


@dataclass(slots=True)
class _Member:
    trainers: int
    period: int
    heard_s: float
    #: The running loss of its leader, and when it said so.
    loss: float | None = None

    @property
    def share(self) -> int:
        return self.trainers * self.period


@dataclass(slots=True)
class _Cycle:
    """`total`: all that is given, also what another server gave to nodes that this one has not heard of yet."""

    given: dict[bytes, int] = field(default_factory=dict)
    total: int = 0


class GlobalCycles:
    """The state of one server. A node that says nothing for `silence_s`, in monotonic seconds, is counted no more."""

    def __init__(self, silence_s: float = 30.0) -> None:
        self._silence_s = silence_s
        self._members: dict[bytes, _Member] = {}
        self._cycles: dict[int, _Cycle] = {}

    @property
    def trainers(self) -> int:
        """All that take part."""
        return sum(member.trainers for member in self._members.values())

    def lost(self, node: bytes) -> None:
        """A node has died or left: its share of the cycles is gone, and so is what it has taken of them."""
        self._members.pop(node, None)
        for cycle in self._cycles.values():
            cycle.total -= cycle.given.pop(node, 0)

    @property
    def leader(self) -> bytes | None:
        """The member with the lowest running loss, of equal ones that with the lowest id."""
        known = [(member.loss, node) for node, member in self._members.items() if member.loss is not None]
        return min(known)[1] if known else None

    def lease(self, node: bytes, ask: LeaseSteps, now: float) -> StepsLeased:
        """What a node may take of a cycle, now that it asks."""
        self._forget_silent(now)
        member = self._members.get(node)
        if member is None:
            member = self._members[node] = _Member(ask.trainers, ask.period, now)
        member.trainers, member.period, member.heard_s = ask.trainers, ask.period, now
        member.loss = ask.loss if ask.loss is not None and math.isfinite(ask.loss) else None
        if ask.cycle <= max(self._cycles, default=0) - CYCLES_KEPT:
            return StepsLeased(ask.cycle, max(ask.taken, member.share), True, ask.total, self.leader)
        books = self._cycles.setdefault(ask.cycle, _Cycle())
        if len(self._cycles) > CYCLES_KEPT:
            del self._cycles[min(self._cycles)]
        given = books.given.get(node, 0)
        if given <= ask.taken:  # otherwise the last answer was lost, and is repeated
            books.given[node] = ask.taken
            books.total = max(books.total, ask.total, sum(books.given.values()))
            left = self._left(books, node)
            if ask.wants > 0 and left:
                # At most half of its part of what is left: many at first, and single steps in the end.
                count = min(left, max(ask.wants, left * member.trainers // (2 * self.trainers)))
                books.given[node] += count
                books.total += count
        return StepsLeased(ask.cycle, books.given[node], not self._left(books, node), books.total, self.leader)

    def _left(self, books: _Cycle, node: bytes) -> int:
        """What a node may still take: what nobody has, without one step for each trainer of others that has none. In
        any case it is one for each of its own."""
        quota = sum(member.share for member in self._members.values())
        needs = {other: max(0, one.trainers - books.given.get(other, 0)) for other, one in self._members.items()}
        own = needs.pop(node)
        return max(quota - books.total - sum(needs.values()), own)

    def _forget_silent(self, now: float) -> None:
        for node, member in list(self._members.items()):
            if now - member.heard_s > self._silence_s:
                self.lost(node)
