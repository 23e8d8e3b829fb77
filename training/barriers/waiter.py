"""Waits at a barrier: draws a sample of peers, queries those that lag, tests the barrier, and repeats until it passes.

A peer known to have completed enough steps is not queried: within an incarnation steps never decrease. Every re-poll
draws a **fresh** sample; holding one sample until it passes is a different, much slower algorithm. Under a sampled
barrier a peer that does not answer leaves the sample. Under a complete one (bsp, ssp) a silent peer counts until the
failure detector declares it dead. Under every barrier a peer that answers but makes no progress stops counting
(`Peer.counts_for_barrier`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from overlay.environment import Clock
from overlay.peers import Peer
from training.barriers.predicates import Barrier, resample_after, sample_size
from training.settings import BarrierSettings
from training.swarm import Swarm


@dataclass(frozen=True, slots=True)
class BarrierWait:
    """Why the barrier has not passed: `since` when (monotonic seconds), how many of the sample are behind, the
    slowest."""

    since: float
    behind: int
    sampled: int
    slowest: bytes
    its_step: int


class BarrierWaiter:
    """The barrier of one node."""

    def __init__(self, swarm: Swarm, barrier: Barrier, settings: BarrierSettings, clock: Clock) -> None:
        self._swarm = swarm
        self.barrier = barrier
        self._settings = settings
        self._clock = clock
        self.waiting: BarrierWait | None = None
        self.queries = 0
        #: The start of this node's training, in monotonic seconds.
        self._began_at = 0.0

    def begin(self) -> None:
        """Mark the start of training: a peer that is ready now counts as if it had become ready at this moment."""
        self._began_at = self._clock.monotonic()

    async def wait(self, step: int, step_seconds: float) -> float:
        """Wait until the node, which has completed `step`, may start the next one; returns the seconds waited."""
        if not self.barrier.samples:
            return 0.0
        started = self._clock.monotonic()
        pause_s = resample_after(self._settings.resample_s, step_seconds)
        try:
            while True:
                if await self._passes(step, started):
                    break
                await asyncio.sleep(pause_s)
        finally:
            self.waiting = None
        return self._clock.monotonic() - started

    def sample_now(self) -> int:
        """The sample size β at the present population."""
        return sample_size(self._settings.sample, self._swarm.population().estimate)

    async def _passes(self, step: int, started: float) -> bool:
        began = self._began_at
        sample = (
            self._swarm.all_members(began) if self.barrier.complete else self._swarm.sample(self.sample_now(), began)
        )
        sufficient_step = self.barrier.enough(step)
        lagging = [peer.node_id for peer in sample if sufficient_step is None or peer.step < sufficient_step]
        queried_at = self._clock.monotonic()
        if lagging:
            self.queries += len(lagging)
            await self._swarm.query_steps(lagging)
        now = self._clock.monotonic()
        counted = [
            peer for node in sample if (peer := self._counted(node.node_id, lagging, queried_at, now)) is not None
        ]
        if self.barrier.passes(step, [peer.step for peer in counted]):
            return True
        slowest = min(counted, key=lambda peer: (peer.step, peer.node_id), default=None)
        limit = step if sufficient_step is None else sufficient_step
        behind = sum(peer.step < limit for peer in counted)
        if slowest is None:  # a custom predicate may refuse an empty sample
            self.waiting = BarrierWait(started, 0, 0, self._swarm.node_id, step)
        else:
            self.waiting = BarrierWait(started, behind, len(counted), slowest.node_id, slowest.step)
        return False

    def _counted(self, node_id: bytes, queried: list[bytes], queried_at: float, now: float) -> Peer | None:
        """The peer if it counts for this test, after the answers have come in."""
        peer = self._swarm.peers.get(node_id)
        if peer is None or not self._swarm.is_alive(node_id) or not peer.counts_for_barrier(now, self._began_at):
            return None
        unanswered = node_id in queried and peer.last_heard < queried_at
        return None if unanswered and not self.barrier.complete else peer
