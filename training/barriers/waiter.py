"""Waiting at a barrier: draw a fresh sample, ask those believed behind, decide, and again.

A peer already known to be far enough is not asked: steps never go back within an incarnation. Every re-poll draws a
**fresh** sample; holding one sample until it passes is another, much slower algorithm. Under a sampled barrier a
peer that does not answer leaves the sample; under a complete one (bsp, ssp) it counts until liveness says it is dead.
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
    """Whom a node waits for: `since` in monotonic seconds, `slowest` and `its_step` of the last sample."""

    since: float
    behind: int
    sampled: int
    slowest: bytes
    its_step: int


class BarrierWaiter:
    """Runs one node's barrier."""

    def __init__(self, overlay: Swarm, barrier: Barrier, settings: BarrierSettings, clock: Clock) -> None:
        self._overlay = overlay
        self.barrier = barrier
        self._settings = settings
        self._clock = clock
        self.waiting: BarrierWait | None = None
        self.queries = 0
        #: When this node began to train, in monotonic seconds.
        self._began_at = 0.0

    def begin(self) -> None:
        """Training begins now: who is ready now is about to begin as well, however long ready."""
        self._began_at = self._clock.monotonic()

    async def wait(self, step: int, step_seconds: float) -> float:
        """Return when the node that has completed `step` may go on; gives the seconds waited."""
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
        """β as it is at the present population."""
        return sample_size(self._settings.sample, self._overlay.population().estimate)

    async def _passes(self, step: int, started: float) -> bool:
        began = self._began_at
        sample = (
            self._overlay.everyone(began) if self.barrier.complete else self._overlay.draw(self.sample_now(), began)
        )
        enough = self.barrier.enough(step)
        doubtful = [peer.node_id for peer in sample if enough is None or peer.step < enough]
        asked_at = self._clock.monotonic()
        if doubtful:
            self.queries += len(doubtful)
            await self._overlay.query_steps(doubtful)
        now = self._clock.monotonic()
        counted = [
            peer for node in sample if (peer := self._counted(node.node_id, doubtful, asked_at, now)) is not None
        ]
        if self.barrier.passes(step, [peer.step for peer in counted]):
            return True
        slowest = min(counted, key=lambda peer: (peer.step, peer.node_id), default=None)
        limit = step if enough is None else enough
        behind = sum(peer.step < limit for peer in counted)
        if slowest is None:  # a custom predicate may want company
            self.waiting = BarrierWait(started, 0, 0, self._overlay.node_id, step)
        else:
            self.waiting = BarrierWait(started, behind, len(counted), slowest.node_id, slowest.step)
        return False

    def _counted(self, node_id: bytes, doubtful: list[bytes], asked_at: float, now: float) -> Peer | None:
        peer = self._overlay.peers.get(node_id)
        if peer is None or not self._overlay.is_alive(node_id) or not peer.takes_part(now, self._began_at):
            return None
        silent = node_id in doubtful and peer.last_heard < asked_at
        return None if silent and not self.barrier.complete else peer
