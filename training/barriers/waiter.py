"""Waits at a barrier: draws a sample of peers, queries those that lag, tests the barrier, and repeats until it passes.

A peer known to have completed enough steps is not queried: within an incarnation steps never decrease. Every test
draws a **fresh** sample; holding one sample until it passes is a different, much slower algorithm. Under a sampled
barrier a peer that does not answer leaves the sample. Under a complete one (bsp, ssp) a silent peer counts until the
failure detector declares it dead, or until this node has not heard it for `STALL_FLOOR_S`. Without the second limit two
nodes that reach all others but not each other would wait for each other for ever. Under every barrier a peer that
answers but makes no progress stops counting (`Peer.counts_for_barrier`), whatever step time it announces
(`longest_idle_s`). A quarantined peer is not waited for (`training.exchange.peer_score`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from p2pnode.overlay.environment import Clock
from p2pnode.overlay.peers import STALL_FLOOR_S, STALL_STEPS, Peer
from p2pnode.training.barriers.predicates import (
    LARGEST_SAMPLE,
    Barrier,
    resample_after,
    sample_size,
)
from p2pnode.training.settings import BarrierSettings
from p2pnode.training.swarm import Swarm

#: Longest wait for a peer without progress where no third node shows how long a step takes: in a pair, or while all
#: nodes are in their first step. Compiling a large model takes minutes.
LONGEST_UNPROVEN_S = 600.0


def longest_idle_s(step_times_s: list[float], announced_s: float) -> float:
    """How long a peer may be without progress, by the (upper) median of the step times of the others, this node
    included: a step time that was measured over a pause of a machine prolongs nothing. Where fewer than two are known,
    the step time that the peer announces counts too, up to `LONGEST_UNPROVEN_S`."""
    if len(step_times_s) < 2:
        return max(STALL_FLOOR_S, min(STALL_STEPS * max([*step_times_s, announced_s]), LONGEST_UNPROVEN_S))
    return max(STALL_FLOOR_S, STALL_STEPS * sorted(step_times_s)[len(step_times_s) // 2])


@dataclass(frozen=True, slots=True)
class BarrierWait:
    """Why the barrier has not passed: since when (monotonic seconds), how many of the sample are behind, and the
    slowest of them with its step."""

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
        #: Peers asked for their steps by all tests so far.
        self.queries = 0
        self._is_excluded: Callable[[bytes], bool] = lambda _node_id: False
        #: The start of this node's training, in monotonic seconds.
        self._began_at = 0.0
        #: How long after this start each node was first seen to have ended its first step.
        self._first_steps_s: dict[bytes, float] = {}

    def begin(self) -> None:
        """Mark the start of training: a peer that is ready now counts as if it had become ready at this moment."""
        self._began_at = self._clock.monotonic()
        self._first_steps_s.clear()

    def exclude(self, is_excluded: Callable[[bytes], bool]) -> None:
        """Do not wait for these nodes. Others may ignore them too, so that they make no progress."""
        self._is_excluded = is_excluded

    async def ask(self) -> float:
        """Ask others for their steps, whatever is known of them; returns the moment of asking, in monotonic seconds: a
        peer heard after it has answered. A node that was stopped suspects all others, so suspects are asked too."""
        asked_at = self._clock.monotonic()
        asked = [peer for peer in self._swarm.members() if not self._is_excluded(peer.node_id)]
        if len(asked) > LARGEST_SAMPLE:
            asked = self._sample() or asked[:LARGEST_SAMPLE]
        await self._swarm.query_steps([peer.node_id for peer in asked])
        return asked_at

    async def wait(self, step: int, step_seconds: float) -> float:
        """Wait until this node, which takes `step_seconds` for a step and has trained `step`, may start the next one;
        returns the seconds waited."""
        if not self.barrier.samples:
            return 0.0
        started = self._clock.monotonic()
        self._first_steps_s.setdefault(self._swarm.node_id, started - self._began_at)
        pause_s = resample_after(step_seconds)
        try:
            while True:
                if await self._passes(step, started, step_seconds):
                    break
                await asyncio.sleep(pause_s)
        finally:
            self.waiting = None
        return self._clock.monotonic() - started

    def _sample(self) -> list[Peer]:
        """A fresh sample, or all members where the barrier looks at all."""
        if self.barrier.complete:
            found = self._swarm.all_members(self._began_at)
        else:
            found = self._swarm.sample(self.present_sample_size(), self._began_at)
        return [peer for peer in found if not self._is_excluded(peer.node_id)]

    def present_sample_size(self) -> int:
        """The sample size β at the present population."""
        return sample_size(self._settings.sample, self._swarm.population().estimate)

    async def _passes(self, step: int, started: float, step_seconds: float) -> bool:
        """Test the barrier once on a fresh sample; `waiting` says why it does not pass."""
        sample = self._sample()
        sufficient_step = self.barrier.enough(step)
        surely_enough = inf if sufficient_step is None else sufficient_step
        lagging = [peer.node_id for peer in sample if peer.step < surely_enough]
        queried_at = self._clock.monotonic()
        if lagging:
            self.queries += len(lagging)
            await self._swarm.query_steps(lagging)
        now = self._clock.monotonic()
        counting = (self._if_it_counts(peer.node_id, lagging, queried_at, now) for peer in sample)
        awaited = [
            peer
            for peer in counting
            if peer is not None and (peer.step >= surely_enough or self._makes_progress(peer, step_seconds, now))
        ]
        # Where none of the sample counts there is nobody to wait for, and the barrier passes.
        if self.barrier.passes(step, [peer.step for peer in awaited]):
            return True
        limit = step if sufficient_step is None else sufficient_step
        behind = sum(peer.step < limit for peer in awaited)
        # A custom predicate may refuse an empty sample: this node is the slowest then.
        steps = ((peer.step, peer.node_id) for peer in awaited)
        slowest_step, slowest = min(steps, default=(step, self._swarm.node_id))
        self.waiting = BarrierWait(started, behind, len(awaited), slowest, slowest_step)
        return False

    def _if_it_counts(self, node_id: bytes, queried: list[bytes], queried_at: float, now: float) -> Peer | None:
        """The peer as known after the answers have come in; None where this test does not count it."""
        peer = self._swarm.peers.get(node_id)
        if peer is None or not self._swarm.is_alive(node_id) or not peer.counts_for_barrier(now, self._began_at):
            return None
        if node_id not in queried or peer.last_heard >= queried_at:
            return peer
        return peer if self.barrier.complete and queried_at - peer.last_heard <= STALL_FLOOR_S else None

    def _makes_progress(self, peer: Peer, step_seconds: float, now: float) -> bool:
        """Whether the peer was without progress for no longer than the step times of the other nodes allow."""
        # Promise 3 (docs/faults.md): nobody waits for a node that stands. A silent one is no case of this function.
        idle_s = min(peer.last_heard, now) - max(peer.last_progress, self._began_at)
        if idle_s <= STALL_FLOOR_S:
            return True
        # Whoever waits for this peer makes no progress either, but the time of its last step still counts.
        others = [one for one in self._swarm.members() if one.step_seconds > 0.0 and one.node_id != peer.node_id]
        if not peer.is_in_first_step:
            return idle_s <= longest_idle_s([step_seconds, *(one.step_seconds for one in others)], peer.step_seconds)
        for one in others:
            self._first_steps_s.setdefault(one.node_id, now - self._began_at)
        return idle_s <= longest_idle_s(list(self._first_steps_s.values()), inf)  # it announces no step time yet
