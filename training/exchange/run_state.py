"""The state of a run at one node: its own phase, steps and counts, and what it computes from the list of peers.

Each answer of `SwarmView` takes a pass over all peers, so it is cached for `VIEW_TTL_S`. In a small swarm every change
of membership invalidates the cache.

The number of workers is compared with what other members send. The weight of a delta is its node's share of the nodes
that train, so nodes that count differently make a sum of shares that is not one. A push names the count that its weight
was made with, and its owner lowers the weight to its own count (`training.exchange.owner.validation`); the answer names
the owner's count. Two views differ for a moment after each change. Where they differ for long one of the nodes does not
know all that train, and what its script divides by that number is wrong: `/status` names it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeVar

from p2pnode.overlay.environment import Clock
from p2pnode.overlay.peers import Peer
from p2pnode.training.exchange.peer_score import PeerScore
from p2pnode.training.exchange.store.shard_states import PlausibleSteps
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import MAX_BELIEVED, Fence
from p2pnode.training.swarm import Swarm


class Phase(IntEnum):
    """How far a node has withdrawn from the exchange. Each phase includes the restrictions of the earlier ones."""

    RUNNING = 0
    #: Accepts no shard, neither as owner nor as backup.
    LEAVING = 1
    #: Starts no delta.
    CLOSED = 2
    #: Adds no delta: what it holds now is what it writes to disk.
    DRAINED = 3


@dataclass(slots=True)
class Counters:
    """Bytes, refusals and losses since the start, for `/status` and `/metrics`."""

    bytes_sent: int = 0
    bytes_received: int = 0
    merged: int = 0  # shards of deltas added here as owner
    refused: int = 0  # this node's deltas, by owners
    refused_here: dict[str, int] = field(default_factory=dict)  # others' deltas, by this node, by reason
    unusual_norms: int = 0  # shards of deltas with a norm far above the median
    clipped: int = 0  # shards of deltas that were scaled down
    repaired: int = 0  # deltas of one shard from the other side of a split, added here
    shards_followed: int = 0  # shards brought up to date by changes of their published value
    publications_entered: int = 0  # shards of which the published value was pulled as a whole
    publication_mismatches: int = 0  # shards with another digest after a pull than at their owner; pulled whole
    lost_in_splits: int = 0  # acknowledged on this side of a split, and no longer in the log
    shards_resigned: int = 0  # of this node whose values were not finite, or out of range
    lost_in_restarts: int = 0  # what disks had, and the copies that the swarm was started again with had not
    deltas_sent_again: int = 0  # shards of deltas that an owner acknowledged and lost


@dataclass(slots=True)
class RunState:
    """`step` is the last step this node completed, `passed_step` the last one whose barrier it passed."""

    incarnation: int
    step: int = 0
    passed_step: int = 0
    #: Whether it trains: a node that has not begun has no step to compare with those of others.
    has_begun: bool = False
    phase: Phase = Phase.RUNNING
    counters: Counters = field(default_factory=Counters)

    @property
    def is_leaving(self) -> bool:
        return self.phase >= Phase.LEAVING

    @property
    def is_closed(self) -> bool:
        return self.phase >= Phase.CLOSED

    @property
    def is_drained(self) -> bool:
        return self.phase >= Phase.DRAINED

    def enter(self, phase: Phase) -> None:
        """Move on to a phase; an earlier one than the present changes nothing."""
        self.phase = max(self.phase, phase)

    def pass_barrier(self, step: int) -> None:
        self.passed_step = max(self.passed_step, step)


class RebalanceRequests:
    """What the services of one node ask of its rebalancer. A call only notes the request: the next tick acts on it."""

    def __init__(self, store: ShardStore) -> None:
        self._store = store
        self._awake = asyncio.Event()
        self._orphans: dict[int, None] = {}
        #: Whether a delta has waited for a backup of its shard.
        self.has_waiting_deltas = False

    def wake_for_delta(self) -> None:
        """A delta waits until its shard has a backup."""
        self.has_waiting_deltas = True
        self.wake()

    def wake(self) -> None:
        """Start the next tick at once."""
        self._awake.set()

    async def wait(self, timeout_s: float) -> None:
        """Return at the next `wake`, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._awake.wait()
        self._awake.clear()

    def take_over(self, shard: int) -> None:
        """Ask for a take-over of this shard: it has no living owner, and this node is the first living candidate or has
        a copy."""
        self._orphans[shard] = None

    def collect_orphans(self) -> list[int]:
        """The shards to take over."""
        orphans = list(self._orphans)
        self._orphans.clear()
        return orphans

    def challenge(self, fences: Iterable[Fence]) -> None:
        """Note terms that another node has seen. If this node owns such a shard under a lower term, it has to yield, or
        to raise its term above."""
        ownership = self._store.ownership
        for fence in fences:
            is_news = fence.shard in self._store.owned and fence.term > ownership.fence(fence.shard)
            if is_news and ownership.is_plausible(fence.term):
                ownership.raise_fence(fence.shard, fence.term)
                self.wake()


T = TypeVar("T")

#: Counts that differ by this factor are no matter of chance: of nodes that are known one by one, and of an estimate.
COUNTED_FACTOR, ESTIMATED_FACTOR = 1.2, 1.5
#: Views that differ for so long do not differ because somebody has just come or gone: three times the detection bound.
LASTING_S = 30.0
#: Members whose counts are remembered.
MAX_MEMBERS = 1024


class CountComparison:
    """The members whose counts differ from this node's, and since when."""

    def __init__(self) -> None:
        #: Since when and until when, in monotonic seconds, and the last count of each.
        self._differing: dict[bytes, tuple[float, float, float]] = {}

    def note(self, node: bytes, theirs: float, mine: float, factor: float, now: float) -> None:
        """A member has sent its count; 0: it sent none. Counts differ by `factor` at least."""
        since, _, _ = self._differing.pop(node, (now, 0.0, 0.0))
        if theirs > 0.0 and (theirs * factor <= mine or mine * factor <= theirs):
            self._differing[node] = since, now, theirs
            if len(self._differing) > MAX_MEMBERS:
                del self._differing[next(iter(self._differing))]

    def lasting(self) -> list[tuple[bytes, float]]:
        """The members whose counts have differed for `LASTING_S`, with their counts."""
        return [
            (node, theirs) for node, (since, until, theirs) in self._differing.items() if until - since >= LASTING_S
        ]


#: How long a computed answer is used.
VIEW_TTL_S = 0.2
#: With at most this many peers every change of membership counts at once.
SMALL_SWARM = 50
#: A step beyond this many times the median, plus so many steps, is implausible: a message with it is refused. The
#: factor is large, because without a barrier a fast node may be far ahead.
FURTHEST_FACTOR, FURTHEST_AT_FIRST = 1000, 1_000_000
#: The tighter bound for an era: all deltas of steps before an era are refused, so a false one would stop the others.
LIKELY_FACTOR, LIKELY_AT_FIRST = 100, 1000
#: Under bulk-synchronous rules: what this node has heard of the others is that much behind at most.
PASSABLE_STEPS = 8
#: An unknown node that did not answer counts as gone for this long; for a known one the failure detector decides.
UNKNOWN_FAILED_S = 5.0


def _furthest(step: int) -> int:
    return min(FURTHEST_AT_FIRST + FURTHEST_FACTOR * step, MAX_BELIEVED)


class SwarmView:
    """A cached view of the peers of one node."""

    def __init__(
        self,
        swarm: Swarm,
        clock: Clock,
        run: RunState,
        score: PeerScore,
        *,
        has_steps: bool = True,
        has_backups: bool = True,
    ) -> None:
        """`has_steps`: deltas are numbered by the steps of their nodes, so the median step bounds these numbers.
        `has_backups`: a shard has a backup where another node can be one."""
        self._swarm = swarm
        self.has_steps = has_steps
        self.has_backups = has_backups
        #: Members that send nonsense, and those that are alive and answer no requests, count as gone.
        self.score = score
        #: Members that count the workers differently.
        self.counts = CountComparison()
        self._clock = clock
        self._run = run
        self._has_met_others = False
        #: Answers by name, each with the time at which it was computed.
        self._answers: dict[str, tuple[float, Any]] = {}

    def _cached(self, name: str, compute: Callable[[], T]) -> T:
        now = self._clock.monotonic()
        computed_at, answer = self._answers.get(name, (now, None))
        if answer is None or now - computed_at > VIEW_TTL_S:
            answer = compute()
            self._answers[name] = now, answer
        found: T = answer
        return found

    def is_gone(self, node_id: bytes) -> bool:
        """Whether a node is dead, has left, is ignored or silent, or is unknown and failed to answer a moment ago.

        In a large swarm the owner of a shard may be a node that this one has never met, so an unknown node is not dead.
        Nor is one that another member reaches: there is a hole between it and this node.
        """
        if self.score.is_quarantined(node_id):
            return True
        if self.score.relay(node_id):
            return False
        if self.score.is_silent(node_id):
            return True
        if node_id == self._swarm.node_id or self._swarm.is_alive(node_id):
            return False
        return self.score.failed_within(node_id, UNKNOWN_FAILED_S) or self._swarm.is_gone(node_id)

    def not_quarantined(self) -> list[Peer]:
        """The members that this node does not ignore."""
        return [peer for peer in self._swarm.members() if not self.score.is_quarantined(peer.node_id)]

    def median_step(self) -> int:
        """The median completed step of the known workers, this node included. With two nodes it is the larger step."""
        return self._cached("median step", lambda: self.median_step_of_those_heard(0.0))

    def median_step_of_those_heard(self, since: float) -> int:
        """`median_step` among the workers that were heard since then: a dead one is at its last step for as long as
        nobody has missed it."""
        now = self._clock.monotonic()
        others = [peer.step for peer in self.not_quarantined() if peer.last_heard >= since and peer.is_worker(now)]
        if len(others) == 1 and self._run.has_begun and others[0] > _furthest(self._run.step):
            others.clear()  # promise 7: no third node contradicts a single other one
        steps = sorted([self._run.step, *others])
        return steps[len(steps) // 2]

    def furthest_step(self) -> int:
        """The largest plausible step of any node; messages with later ones are refused.

        Before the first step there is no such bound: a node that starts does not know the others' steps yet.
        """
        median = self.median_step() if self.has_steps else 0
        return _furthest(median) if median else MAX_BELIEVED

    def passable_step(self) -> int:
        """Under bulk-synchronous rules no node has passed the barrier of a later step: most others have come as far
        then, and each has told its owners so with its last pull."""
        return max(self._run.step, self.median_step()) + PASSABLE_STEPS

    def plausible_steps(self) -> PlausibleSteps:
        """Bounds for the steps in another node's state: twice this node's own, because the views differ a little."""
        median = self.median_step() if self.has_steps else 0
        likely = min(2 * (LIKELY_AT_FIRST + LIKELY_FACTOR * median), MAX_BELIEVED) if median else MAX_BELIEVED
        return PlausibleSteps(min(2 * self.furthest_step(), MAX_BELIEVED), likely)

    def worker_count(self) -> float:
        """`Swarm.workers`, cached."""
        return self._cached("workers", self._swarm.workers)

    def merged_weight(self, weight: float, workers: float) -> float:
        """What a delta weighs here that was trained apart from this node, and weighed among so many workers:
        `w · N_side / N_merged`."""
        return weight * workers / max(workers, self.worker_count())

    def corrected(self, weight: float, workers: float) -> float:
        """A weight that was made with this number of workers, as this node's number makes it if that is larger. Nobody
        counts nodes that are not there for longer than it takes to miss one, so the larger number is the better one."""
        mine = self.worker_count()
        return weight * workers / mine if 0.0 < workers * self._count_factor() <= mine else weight

    def compare_count(self, node_id: bytes, workers: float) -> None:
        """A member has sent the number of workers by its count."""
        self.counts.note(node_id, workers, self.worker_count(), self._count_factor(), self._clock.monotonic())

    def _count_factor(self) -> float:
        return COUNTED_FACTOR if self._swarm.population().exact else ESTIMATED_FACTOR

    def median_step_seconds(self) -> float:
        """The median step time that the other workers announce; 0 while none has."""
        return self._cached("step seconds", self._median_step_seconds)

    def _median_step_seconds(self) -> float:
        now = self._clock.monotonic()
        peers = [peer for peer in self.not_quarantined() if peer.step_seconds > 0.0 and peer.is_worker(now)]
        known = sorted(peer.step_seconds for peer in peers)
        return known[len(known) // 2] if known else 0.0

    def has_met_others(self) -> bool:
        """Whether this swarm has or had another node; remembered peers of earlier starts count."""
        if not self._has_met_others:
            self._has_met_others = bool(self._swarm.members() or self._swarm.remembered())
        return self._has_met_others

    def expects_backups(self) -> bool:
        """Whether every shard has a backup, or is about to get one."""
        return self.has_backups and self.has_eligible_others()

    def has_eligible_others(self) -> bool:
        """Whether another known node could own or back up a shard."""
        return self._cached("eligible others", self._has_eligible_others)

    def _has_eligible_others(self) -> bool:
        is_silent = self.score.is_silent
        return any(self._swarm.may_own(peer) and not is_silent(peer.node_id) for peer in self.not_quarantined())

    def invalidate(self) -> None:
        """Compute again, because membership or this node's step has changed.

        In a large swarm the cached answers stay, because one change matters little there. Otherwise each of a thousand
        simultaneous joins would take a pass over a thousand peers.
        """
        if len(self._swarm.peers) <= SMALL_SWARM:
            self._answers.clear()
