"""The reference engine: discrete events in plain Python, with the daemon's `Barrier` making every decision.

It supports every feature of a `Plan`: disciplines, samplers, message delay, churn, custom barriers. Besides its crash
a node has at most one pending event: the end of its step, or its next test of the barrier. Whether a node may proceed
is decided by `training.barriers.predicates`, the code that the daemon runs. Pure.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Protocol

import numpy as np

from p2pnode.training.barriers.predicates import sample_size
from p2pnode.training.simulation.outcome import Moment, Outcome, Trace, moment_of
from p2pnode.training.simulation.plan import Plan
from p2pnode.training.simulation.random_streams import CHURN, DURATIONS, ESTIMATES, RandomStream
from p2pnode.training.simulation.samplers import BiasedSampler, PoolSampler, UniformSampler


class Kind(IntEnum):
    """Kinds of events; those of one node at one time happen in this order."""

    FINISH = 0
    POLL = 1
    READ = 2
    DECIDE = 3
    ANNOUNCE = 4
    CRASH = 5
    REMOVE = 6
    JOIN = 7


class Observer(Protocol):
    """Is called during a run; `step` counts the completed steps of the node."""

    def started(self, now: float, node: int, step: int) -> None:
        """The node has pulled and begins its next step."""

    def completed(self, now: float, node: int, step: int) -> None:
        """The node has completed `step` and pushes its delta."""


class ReferenceEngine:
    """One run. Progress is recorded at each of `moments_s`, and every completion with `keep_trace`."""

    def __init__(
        self,
        plan: Plan,
        *,
        moments_s: Sequence[float] = (),
        keep_trace: bool = False,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self.plan = plan
        self.barrier = plan.made_barrier()
        self._observer: Observer | None = None
        self._progress = progress
        self._heap: list[tuple[float, int, int]] = []
        self._durations: list[RandomStream] = []
        self._beliefs: list[float] = []
        self._completed_s: list[float] = []
        self._blocked: dict[int, None] = {}
        self._held: dict[int, list[int]] = {}
        self._queried: dict[int, list[int]] = {}
        self._results: dict[int, bool] = {}
        self._last_pass: list[int] = []
        self._crashed: list[bool] = []
        self._removed: list[bool] = []
        self.steps: list[int] = []
        #: Steps as known to the other nodes; `delay_s` late under disciplines that notify instead of polling.
        self._seen: list[int] = []
        self._waited_s: list[float] = []
        self.alive: list[int] = []
        self._updates = self._passes = self._tests = self._queries = self._gap_sum = 0
        self._gap_squares = 0.0
        self._moments: list[Moment] = []
        self._due_moments = sorted(moments_s)
        self._trace: tuple[list[float], list[int], list[int]] | None = ([], [], []) if keep_trace else None
        self._is_notified = plan.discipline in ("event", "hold")
        self._sampler = self._make_sampler()
        #: If every member of a sample must be far enough, the first one that is not decides.
        self._stops_early = self.barrier.quantile >= 1.0 and self.barrier.staleness is not None
        for _ in range(plan.nodes):
            self._add_node(0)
        self._sampler.changed()

    def run(self, observer: Observer | None = None) -> Outcome:
        """Run to the end of the plan's duration; `observer` sees every step begin and end."""
        self._observer = observer
        for node in range(self.plan.nodes):
            self._schedule_crash(0.0, node)
            self._begin_step(node, 0.0)
        end = self.plan.duration_s
        shown = 0
        while self._heap and self._heap[0][0] <= end:
            now, node, kind = heapq.heappop(self._heap)
            self._keep_moments(now)
            if self._progress is not None and int(100 * now / end) > shown:
                shown = int(100 * now / end)
                self._progress(now / end)
            self._handle(now, node, Kind(kind))
        self._keep_moments(math.inf)
        for node in self._blocked:
            self._waited_s[node] += end - self._completed_s[node]
        return self._outcome()

    def belief(self, node: int) -> float:
        """The node's estimate of the population size."""
        return self._beliefs[node] * len(self.alive)

    # -- events -------------------------------------------------------------------------------------------------

    def _handle(self, now: float, node: int, kind: Kind) -> None:
        if self._crashed[node] and kind not in (Kind.REMOVE, Kind.JOIN, Kind.ANNOUNCE):
            return
        match kind:
            case Kind.FINISH:
                self._finish(now, node)
            case Kind.POLL:
                self._poll(now, node)
            case Kind.READ:
                self._results[node] = self._barrier_passes(node, [self.steps[peer] for peer in self._queried.pop(node)])
                self._push(now + self.plan.delay_s, node, Kind.DECIDE)
            case Kind.DECIDE:
                self._decide(now, node, self._results.pop(node))
            case Kind.ANNOUNCE:
                self._seen[node] += 1
                self._test_blocked(now)
            case Kind.CRASH:
                self._crash(now, node)
            case Kind.REMOVE:
                self._remove(now, node)
            case Kind.JOIN:
                self._join(now)

    def _begin_step(self, node: int, now: float) -> None:
        if self._observer is not None:
            self._observer.started(now, node, self.steps[node])
        self._push(now + self._step_seconds(node), node, Kind.FINISH)

    def _step_seconds(self, node: int) -> float:
        stream, slow = self._durations[node], self.plan.stragglers
        seconds = self.plan.steps.draw(stream)
        if slow.transient:
            return seconds * slow.factor if stream.uniform() < slow.share else seconds
        return seconds * slow.factor if node < slow.count(self.plan.nodes) else seconds

    def _finish(self, now: float, node: int) -> None:
        self.steps[node] += 1
        self._updates += 1
        self._completed_s[node] = now
        if self._trace is not None:
            self._trace[0].append(now)
            self._trace[1].append(node)
        if self._observer is not None:
            self._observer.completed(now, node, self.steps[node])
        if not self.barrier.samples:
            self._pass(now, node)
            return
        self._blocked[node] = None
        if not self._is_notified:
            self._poll(now, node)
            return
        if self.plan.discipline == "hold" and not self.barrier.complete:
            self._held[node] = self._sampler.draw(node, self._beta(node), now, lambda _peer: False)
            self._queries += len(self._held[node])
            self._tests += 1
        elif self.plan.discipline == "hold":
            self._queries += len(self.alive) - 1
            self._tests += 1
        if self.plan.delay_s > 0:
            self._push(now + self.plan.delay_s, node, Kind.ANNOUNCE)
            self._test(now, node)
        else:
            self._seen[node] += 1
            self._test_blocked(now)

    def _poll(self, now: float, node: int) -> None:
        """Query a fresh sample; the answer arrives two delays later."""
        if self.plan.delay_s == 0.0:
            self._decide(now, node, self._passes_fresh_sample(now, node))
            return
        if self.barrier.complete:
            self._queried[node] = [peer for peer in self.alive if peer != node]
        else:
            self._queried[node] = self._sampler.draw(node, self._beta(node), now, lambda _peer: False)
        self._tests += 1
        self._queries += len(self._queried[node])
        self._push(now + self.plan.delay_s, node, Kind.READ)

    def _decide(self, now: float, node: int, passes: bool) -> None:
        if passes:
            self._pass(now, node)
        else:
            self._push(now + self.plan.repoll_s, node, Kind.POLL)

    def _test_blocked(self, now: float) -> None:
        for node in list(self._blocked):
            self._test(now, node)

    def _test(self, now: float, node: int) -> None:
        """Test again after a completion was announced."""
        if self.plan.discipline == "event":
            passes = self._passes_fresh_sample(now, node)
        elif self.barrier.complete:
            passes = self._barrier_passes(node, [self._seen[peer] for peer in self.alive if peer != node])
        else:
            passes = self._barrier_passes(node, [self._seen[peer] for peer in self._held[node]])
        if passes:
            self._held.pop(node, None)
            self._pass(now, node)

    def _pass(self, now: float, node: int) -> None:
        self._blocked.pop(node, None)
        self._passes += 1
        self._waited_s[node] += now - self._completed_s[node]
        gap = self._updates - self._last_pass[node]
        self._last_pass[node] = self._updates
        self._gap_sum += gap
        self._gap_squares += gap * gap
        if self._trace is not None:
            self._trace[2].append(gap)
        self._begin_step(node, now)

    # -- the barrier --------------------------------------------------------------------------------------------

    def _passes_fresh_sample(self, now: float, node: int) -> bool:
        """One test, on all nodes or on a sample drawn now."""
        steps = self._seen if self._is_notified else self.steps
        self._tests += 1
        if self.barrier.complete:
            self._queries += len(self.alive) - 1
            return self._barrier_passes(node, [steps[peer] for peer in self.alive if peer != node])
        beta = self._beta(node)
        self._queries += min(beta, len(self.alive) - (not self.plan.self_sampled))

        def decided(peer: int) -> bool:
            return self._stops_early and not self._barrier_passes(node, (steps[peer],))

        sample = self._sampler.draw(node, beta, now, decided)
        return self._barrier_passes(node, [steps[peer] for peer in sample])

    def _barrier_passes(self, node: int, others: Sequence[int]) -> bool:
        return self.barrier.passes(self.steps[node], others)

    def _beta(self, node: int) -> int:
        return sample_size(self.plan.barrier.sample, self.belief(node))

    # -- nodes --------------------------------------------------------------------------------------------------

    def _make_sampler(self) -> UniformSampler:
        plan = self.plan
        if plan.sampler == "biased":
            return BiasedSampler(plan.seed, self.alive, self_sampled=plan.self_sampled)
        if plan.discipline == "pool":
            return PoolSampler(
                plan.seed,
                self.alive,
                self_sampled=plan.self_sampled,
                size=plan.pool_size,
                renewal_s=plan.pool_renewal_s,
                founders=plan.nodes,
                is_live=self._is_listed,
            )
        return UniformSampler(plan.seed, self.alive, self_sampled=plan.self_sampled)

    def _is_listed(self, node: int) -> bool:
        return not self._removed[node]

    def _add_node(self, step: int) -> int:
        node = len(self.steps)
        self._durations.append(RandomStream(self.plan.seed, DURATIONS, node))
        self._beliefs.append(belief_factor(self.plan, node))
        self.steps.append(step)
        self._seen.append(step)
        self._completed_s.append(0.0)
        self._waited_s.append(0.0)
        self._last_pass.append(self._updates)
        self._crashed.append(False)
        self._removed.append(False)
        self.alive.append(node)
        return node

    def _crash(self, now: float, node: int) -> None:
        churn = self.plan.churn
        self._crashed[node] = True
        self._blocked.pop(node, None)
        self._push(now + churn.detection_s, node, Kind.REMOVE)
        self._push(now + churn.rejoin_s, node, Kind.JOIN)

    def _remove(self, now: float, node: int) -> None:
        self._removed[node] = True
        self.alive.remove(node)
        self._sampler.changed()
        for held in self._held.values():
            if node in held:
                held.remove(node)
        if self._is_notified:
            self._test_blocked(now)

    def _join(self, now: float) -> None:
        live = [self.steps[node] for node in self.alive if not self._crashed[node]]
        node = self._add_node(sorted(live)[len(live) // 2] if live else 0)
        self._sampler.changed()
        self._schedule_crash(now, node)
        self._begin_step(node, now)

    def _schedule_crash(self, now: float, node: int) -> None:
        if self.plan.churn.rate > 0:
            uptime_s = RandomStream(self.plan.seed, CHURN, node).exponential() / self.plan.churn.rate
            self._push(now + uptime_s, node, Kind.CRASH)

    # -- recording ----------------------------------------------------------------------------------------------

    def _push(self, when: float, node: int, kind: Kind) -> None:
        heapq.heappush(self._heap, (when, node, int(kind)))

    def _keep_moments(self, now: float) -> None:
        while self._due_moments and self._due_moments[0] < now:
            self._moments.append(moment_of(self._due_moments.pop(0), self._live_steps()))

    def _live_steps(self) -> list[int]:
        return [steps for steps, crashed in zip(self.steps, self._crashed, strict=True) if not crashed]

    def _outcome(self) -> Outcome:
        trace = None
        if self._trace is not None:
            times, nodes, gaps = self._trace
            trace = Trace(np.array(times, np.float64), np.array(nodes, np.int64), np.array(gaps, np.int64))
        waited = [waited for waited, crashed in zip(self._waited_s, self._crashed, strict=True) if not crashed]
        return Outcome(
            plan=self.plan,
            engine="reference",
            steps=np.array(self._live_steps(), np.int64),
            waited_s=np.array(waited, np.float64),
            updates=self._updates,
            passes=self._passes,
            tests=self._tests,
            queries=self._queries,
            gap_sum=self._gap_sum,
            gap_squares=self._gap_squares,
            moments=tuple(self._moments),
            trace=trace,
        )


def belief_factor(plan: Plan, node: int) -> float:
    """The believed over the true population: log-normal with mean 1 and the plan's relative standard deviation."""
    if plan.population_error == 0.0:
        return 1.0
    variance = math.log1p(plan.population_error**2)
    return math.exp(math.sqrt(variance) * RandomStream(plan.seed, ESTIMATES, node).normal() - variance / 2)
