"""What changes about this node while its exchange runs: phase, steps, counts, and requests to its rebalancer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import Fence


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

    def advance(self, step: int) -> None:
        """This node has completed a step, or begins after it."""
        self.step, self.has_begun = step, True

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
