"""What the parts of the exchange share: the store, the doors, the replica, and counters."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from overlay.environment import Clock, Executor, Log
from overlay.peers import Contact
from overlay.transport import Body, ReceivedResponse, TransportError
from training.encoding.codecs import Vector
from training.exchange.counters import Counters
from training.exchange.messages import decode, encode
from training.exchange.rpc import A
from training.exchange.store.shard_store import ShardStore
from training.exchange.terms import ZERO_TERM, Fence, Term
from training.exchange.timeouts import AdaptiveTimeouts, Kind
from training.settings import ExchangeSettings
from training.swarm import Swarm

#: Answers that need a look at every peer are good for this long.
GLANCE_S = 0.2
#: Among so few peers every change counts at once.
FEW = 50
#: A stranger that failed to answer counts as gone this long; one we know is liveness's to judge.
STRANGER_FAILED_S = 5.0


@dataclass(slots=True)
class ExchangeContext:
    """Shared by serving, pushing, pulling and keeping. `replica` is the vector as last pulled (the trainer's own
    shared memory); `marks[i]` is the (term, version) of its shard *i*, the term by which it ranks."""

    overlay: Swarm
    store: ShardStore
    genesis: bytes
    settings: ExchangeSettings
    synchronous: bool
    stale_limit: int | None
    clock: Clock
    workers: Executor
    log: Log
    incarnation: int
    random: random.Random
    replica: Vector
    marks: list[tuple[Term, int]]
    counters: Counters = field(default_factory=Counters)
    deadlines: AdaptiveTimeouts = field(default_factory=AdaptiveTimeouts)
    #: Steps completed by this node, and the last one whose barrier it has passed.
    step: int = 0
    passed_step: int = 0
    #: A leaving node takes nothing more; a closed one begins no delta; a sealed one adds none: what it has is on disk.
    leaving: bool = False
    closed: bool = False
    sealed: bool = False
    #: Until this moment, in monotonic seconds, nothing is taken over: a node that has just been started learns first
    #: who is there.
    settled_at: float = 0.0
    #: Set by `keeping`: called when something about ownership should be looked at soon.
    wake: Callable[[], None] = lambda: None
    #: Shards owned here of which somebody has seen a higher term.
    challenges: dict[int, Term] = field(default_factory=dict)
    #: When a request to a node last failed, in monotonic seconds.
    failures: dict[bytes, float] = field(default_factory=dict)
    _has_met_others: bool = False
    _others_eligible: tuple[float, bool] = (-1.0, False)
    _median: tuple[float, int] = (-1.0, 0)
    _worker_count: tuple[float, float] = (-1.0, 1.0)

    def me(self) -> Contact:
        return Contact(self.overlay.node_id, self.overlay.address)

    def challenge(self, fences: Iterable[Fence]) -> None:
        """Somebody has seen these terms: an owner below one of them has to yield, or to rise above it."""
        for fence in fences:
            owned = self.store.owned.get(fence.shard)
            if owned is not None and fence.term > owned.term:
                self.challenges[fence.shard] = max(fence.term, self.challenges.get(fence.shard, ZERO_TERM))
                self.wake()

    def jitter(self) -> float:
        """A factor of 0.5 to 1.5, so that retries of many nodes do not march in step."""
        return self.random.uniform(0.5, 1.5)

    def gone(self, node_id: bytes) -> bool:
        """Whether a node must not be counted on: dead, left, or a stranger that did not answer lately.

        In a large swarm the owner of a shard may be a node this one has never met: not known is not dead.
        """
        if node_id == self.overlay.node_id or self.overlay.is_alive(node_id):
            return False
        failed_at = self.failures.get(node_id)
        recently = failed_at is not None and self.clock.monotonic() - failed_at < STRANGER_FAILED_S
        return recently or self.overlay.is_gone(node_id)

    def median_step(self) -> int:
        """The median completed step of the workers known, this node included; a moment old at most."""
        now = self.clock.monotonic()
        looked_at, median = self._median
        if now - looked_at > GLANCE_S or looked_at < 0:
            steps = sorted([self.step, *(peer.step for peer in self.overlay.members() if peer.is_worker(now))])
            median = steps[len(steps) // 2]
            self._median = (now, median)
        return median

    def worker_count(self) -> float:
        """`Overlay.workers`, a moment old at most."""
        now = self.clock.monotonic()
        looked_at, count = self._worker_count
        if now - looked_at > GLANCE_S or looked_at < 0:
            count = self.overlay.workers()
            self._worker_count = (now, count)
        return count

    def has_met_others(self) -> bool:
        """Whether there is, or ever was, anybody else in this swarm; remembered peers of earlier starts count."""
        if not self._has_met_others:
            self._has_met_others = bool(self.overlay.members() or self.overlay.remembered())
        return self._has_met_others

    def other_eligible(self) -> bool:
        """Whether any other node that could be a backup is to be seen."""
        now = self.clock.monotonic()
        checked_at, answer = self._others_eligible
        if now - checked_at > GLANCE_S or checked_at < 0:
            answer = any(self.overlay.may_own(peer) for peer in self.overlay.members())
            self._others_eligible = (now, answer)
        return answer

    def look_again(self) -> None:
        """Membership changed, or our own step: forget what a glance at the peers gave. One among many changes little:
        there the glance holds, or a thousand nodes that join at one moment would each count a thousand as often."""
        if len(self.overlay.peers) > FEW:
            return
        self._others_eligible = (-1.0, False)
        self._median = (-1.0, 0)
        self._worker_count = (-1.0, 1.0)

    def mark(self, shard: int) -> tuple[Term, int] | None:
        """(term, version) of the replica's copy of a shard; None when it was never pulled."""
        term, version = self.marks[shard]
        return None if term == ZERO_TERM else (term, version)

    async def ask(self, to: Contact, name: str, message: msgspec.Struct, kind: type[A], timeout_s: float) -> A:
        """A request without bodies. Raises `TransportError`; a malformed answer counts as `foreign`."""
        async with self.overlay.request(to, name, encode(message), timeout_s=timeout_s) as answer:
            return self.decoded(to, answer.head, kind)

    @asynccontextmanager
    async def request(
        self, kind: Kind, to: Contact, message: msgspec.Struct, body: Body = ()
    ) -> AsyncIterator[ReceivedResponse]:
        """A request with bodies. After a silence that follows from what was measured it is given up, and tried again
        under the same identity. Raises `TransportError`."""
        began = self.clock.monotonic()
        timeout_s = self.deadlines.of(kind, to.node_id)
        try:
            async with self.overlay.request(to, kind, encode(message), body, timeout_s=timeout_s) as answer:
                self.deadlines.answered(kind, to.node_id, self.clock.monotonic() - began)
                yield answer
        except TransportError as error:
            if error.kind == "timeout":
                self.deadlines.silent(kind, to.node_id)
            raise

    def decoded(self, source: Contact, head: bytes, kind: type[A]) -> A:
        try:
            return decode(head, kind)
        except msgspec.DecodeError as error:
            raise TransportError("foreign", source.address, f"gave a malformed answer: {error}") from error
