"""A node's part in a run of an engine: what it announces, how it waits for the others, and when it has finished.

Steps are announced in the heartbeat, and the barrier is the training's (`training.barriers`): a node that takes part is
`TRAINING` for the others, one whose script is between two runs is `PAUSED`, so nobody waits for it, and one that has
finished is `FINISHED`. A node that begins while others are at work begins at their median count, so it holds nobody
back.

A script that begins a second run is seen as finished for `AGAIN_S` before. Otherwise nodes that still wait for the end
of the first run would take it for one that is at work in that, and both would wait for each other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from statistics import median

from p2pnode.overlay.environment import Clock, Log
from p2pnode.overlay.peers import Activity, Peer
from p2pnode.training.barriers.predicates import resample_after
from p2pnode.training.barriers.waiter import BarrierWaiter
from p2pnode.training.progress import Progress
from p2pnode.training.settings import TrainingSettings
from p2pnode.training.swarm import Swarm

POLL_INTERVAL_S = 0.05
#: Steps whose median is the announced step time; and the shortest one, because 0 means that there was no step yet.
PACE_STEPS = 21
SHORTEST_STEP_S = 1e-4
#: A node hears of another one that it shares values with in every round of probes, of 1 s: so it hears that it has
#: finished, also where one message is lost.
AGAIN_S = 2.0


class Participation:
    """Belongs to one node. Counts are those that the engine announces; they rise from one run to the next."""

    def __init__(
        self,
        swarm: Swarm,
        waiter: BarrierWaiter,
        training: TrainingSettings,
        progress: Progress,
        clock: Clock,
        log: Log | None = None,
    ) -> None:
        self._swarm = swarm
        self._waiter = waiter
        self._training = training
        self._progress = progress
        self._clock = clock
        self._log = log
        #: The script has begun, and fewer than `min_nodes` have.
        self.waits_for_nodes = False
        self._pace_s: deque[float] = deque(maxlen=PACE_STEPS)
        self._finished_s: float | None = None
        swarm.announce(activity=Activity.PAUSED)

    @property
    def pause_s(self) -> float:
        """Between two tests of a barrier of the program, at the start."""
        return resample_after(self._progress.step_seconds)

    @property
    def step(self) -> int:
        """The last count."""
        return self._progress.step

    async def begin(self) -> int:
        """Wait until `min_nodes` are there, and take part; returns the count to begin with."""
        now, is_again = self._clock.monotonic(), self._finished_s is not None
        if self._finished_s is not None:
            await asyncio.sleep(self._finished_s + AGAIN_S - now)
            self._finished_s, now = None, self._clock.monotonic()
        # Before it is announced: those that begin with this node, at once, wait for it then.
        others = sorted(peer.step for peer in self._swarm.members() if peer.is_worker(now))
        if others:
            self._progress.step = max(self._progress.step, others[len(others) // 2])
        self._swarm.announce(activity=Activity.READY, step=self._progress.step)
        # Those that have finished the run before come as well, unless their scripts end: it has to begin with them.
        await self._wait_for_nodes(now + 2 * AGAIN_S if is_again else 0.0)
        self._waiter.begin()
        self._swarm.announce(activity=Activity.TRAINING, step=self._progress.step)
        return self._progress.step

    async def _wait_for_nodes(self, among_finished_s: float) -> None:
        """`among_finished_s`: from when on a node counts that has finished."""
        need, after_s = self._training.min_nodes, among_finished_s
        if self._log is not None and self._present(after_s) < need:
            self._log.info("waiting_for_nodes", have=self._present(after_s), need=need)
        try:
            while self._present(after_s) < need:
                self.waits_for_nodes = True
                await asyncio.sleep(POLL_INTERVAL_S)
        finally:
            self.waits_for_nodes = False

    def count(self, count: int, seconds: float) -> None:
        """Announce a count; the step took so many seconds."""
        progress = self._progress
        if count > progress.step:
            self._pace_s.append(max(seconds, SHORTEST_STEP_S))
            progress.step_seconds = median(self._pace_s)
            progress.step = count
        self._swarm.announce(step=progress.step, step_seconds=progress.step_seconds)

    async def wait(self, count: int) -> None:
        """Wait at the barrier of the settings."""
        await self._waiter.wait(count, self._progress.step_seconds)

    async def finish(self) -> None:
        """Take part no more; return when nobody is at work any more, or `linger_s` has passed."""
        self._swarm.announce(activity=Activity.FINISHED)
        self._finished_s = self._clock.monotonic()
        done: dict[bytes, None] = {}  # in the run that ends; they may be at work in the next one
        try:
            async with asyncio.timeout(self._training.linger_s):
                while any(peer.node_id not in done for peer in self._at_work()):
                    done.update(dict.fromkeys(peer.node_id for peer in self._finished()))
                    await asyncio.sleep(POLL_INTERVAL_S)
        except TimeoutError:
            pass

    async def stay(self, limit_s: float) -> None:
        """The script of this node has ended; return when those of all others that have finished have ended too.

        They may still read values, and nodes that leave at the same moment would hand them to one another. Where a
        node is at work there is one that stays, and this one need not.
        """
        self._swarm.announce(activity=Activity.PAUSED)
        try:
            async with asyncio.timeout(limit_s):
                while self._finished() and not self._at_work():  # noqa: ASYNC110 - it follows from heartbeats
                    await asyncio.sleep(POLL_INTERVAL_S)
        except TimeoutError:
            pass

    def abandon(self) -> None:
        """Take part no more; the others go on."""
        self._swarm.announce(activity=Activity.PAUSED)

    def peers(self, sample: int) -> dict[bytes, int]:
        """Counts of the others that take part: of a fresh sample, or with 0 of all."""
        found = self._swarm.sample(sample) if sample else self._swarm.all_members()
        return {peer.node_id: peer.step for peer in found}

    def workers(self) -> int:
        """How many nodes take part, with this one if it does."""
        return max(1, round(self._swarm.workers()))

    def _present(self, after_s: float) -> int:
        present: list[Activity] = [Activity.READY, Activity.TRAINING]
        if self._clock.monotonic() >= after_s:
            present.append(Activity.FINISHED)
        return 1 + sum(peer.activity in present for peer in self._swarm.members())

    def _finished(self) -> list[Peer]:
        return [peer for peer in self._swarm.members() if peer.activity is Activity.FINISHED]

    def _at_work(self) -> list[Peer]:
        at_work = (Activity.READY, Activity.TRAINING)
        return [peer for peer in self._swarm.members() if peer.activity in at_work]
