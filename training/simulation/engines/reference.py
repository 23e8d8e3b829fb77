"""The reference engine: discrete events in plain Python, with the daemon's `Barrier` making every decision.

It knows every feature of a `Plan`: disciplines, samplers, message delay, churn, any barrier. Per node at most one
event is pending besides its death: the end of its step, or its next look at the barrier. Nothing here says when a node
may go on; that is `training.barriers.predicates`, the code the daemon runs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Protocol

import numpy as np

from training.barriers.predicates import sample_size
from training.simulation.model.outcome import Moment, Outcome, Trace, moment_of
from training.simulation.model.plan import Plan
from training.simulation.model.random_streams import CHURN, DURATIONS, ESTIMATES, Stream
from training.simulation.model.samplers import BiasedSampler, PoolSampler, UniformSampler


class Kind(IntEnum):
    """Events; those of one node at one moment happen in this order."""

    FINISH = 0
    POLL = 1
    READ = 2
    DECIDE = 3
    ANNOUNCE = 4
    DIE = 5
    BURY = 6
    JOIN = 7


class Observer(Protocol):
    """Sees a run as it happens; `step` counts completed steps of the node."""

    def started(self, now: float, node: int, step: int) -> None:
        """The node begins to work on its next step: it has what it pulled."""

    def completed(self, now: float, node: int, step: int) -> None:
        """The node has completed `step` and pushes what it gained."""


class ReferenceEngine:
    """One run. `moments_s` are the times of which the spread of steps is kept; `keep_trace` keeps every completion."""

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
        self._durations: list[Stream] = []
        self._beliefs: list[float] = []
        self._completed_s: list[float] = []
        self._blocked: dict[int, None] = {}
        self._held: dict[int, list[int]] = {}
        self._asked: dict[int, list[int]] = {}
        self._verdicts: dict[int, bool] = {}
        self._last_pass: list[int] = []
        self._dead: list[bool] = []
        self._buried: list[bool] = []
        self.steps: list[int] = []
        #: Steps as the others know them; `delay_s` late under the disciplines that are told and do not ask.
        self._seen: list[int] = []
        self._waited_s: list[float] = []
        self.alive: list[int] = []
        self._updates = self._passes = self._tests = self._queries = self._gap_sum = 0
        self._gap_squares = 0.0
        self._moments: list[Moment] = []
        self._due_moments = sorted(moments_s)
        self._trace: tuple[list[float], list[int], list[int]] | None = ([], [], []) if keep_trace else None
        self._told = plan.discipline in ("event", "hold")
        self._sampler = self._make_sampler()
        #: A sample whose every member must be far enough is decided by the first who is not.
        self._lazy = self.barrier.quantile >= 1.0 and self.barrier.staleness is not None
        for _ in range(plan.nodes):
            self._add_node(0)
        self._sampler.changed()

    def run(self, observer: Observer | None = None) -> Outcome:
        """Run to the end of the plan's duration; `observer` sees every step begin and end."""
        self._observer = observer
        for node in range(self.plan.nodes):
            self._schedule_death(0.0, node)
            self._begin(node, 0.0)
        end = self.plan.duration_s
        shown = 0
        while self._heap and self._heap[0][0] <= end:
            now, node, kind = heapq.heappop(self._heap)
            self._keep_moments(now)
            if self._progress is not None and int(100 * now / end) > shown:
                shown = int(100 * now / end)
                self._progress(now / end)
            self._happen(now, node, Kind(kind))
        self._keep_moments(math.inf)
        for node in self._blocked:
            self._waited_s[node] += end - self._completed_s[node]
        return self._outcome()

    def belief(self, node: int) -> float:
        """What the node takes the population to be."""
        return self._beliefs[node] * len(self.alive)

    # -- events -------------------------------------------------------------------------------------------------

    def _happen(self, now: float, node: int, kind: Kind) -> None:
        if self._dead[node] and kind not in (Kind.BURY, Kind.JOIN, Kind.ANNOUNCE):
            return
        match kind:
            case Kind.FINISH:
                self._finish(now, node)
            case Kind.POLL:
                self._look(now, node)
            case Kind.READ:
                self._verdicts[node] = self._judge(node, [self.steps[peer] for peer in self._asked.pop(node)])
                self._push(now + self.plan.delay_s, node, Kind.DECIDE)
            case Kind.DECIDE:
                self._decide(now, node, self._verdicts.pop(node))
            case Kind.ANNOUNCE:
                self._seen[node] += 1
                self._look_all(now)
            case Kind.DIE:
                self._die(now, node)
            case Kind.BURY:
                self._bury(now, node)
            case Kind.JOIN:
                self._join(now)

    def _begin(self, node: int, now: float) -> None:
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
        if not self._told:
            self._look(now, node)
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
            self._look_all(now)

    def _look(self, now: float, node: int) -> None:
        """Ask a fresh sample; the answer comes two delays later."""
        if self.plan.delay_s == 0.0:
            self._decide(now, node, self._fresh(now, node))
            return
        if self.barrier.complete:
            self._asked[node] = [peer for peer in self.alive if peer != node]
        else:
            self._asked[node] = self._sampler.draw(node, self._beta(node), now, lambda _peer: False)
        self._tests += 1
        self._queries += len(self._asked[node])
        self._push(now + self.plan.delay_s, node, Kind.READ)

    def _decide(self, now: float, node: int, passes: bool) -> None:
        if passes:
            self._pass(now, node)
        else:
            self._push(now + self.plan.repoll_s, node, Kind.POLL)

    def _look_all(self, now: float) -> None:
        for node in list(self._blocked):
            self._test(now, node)

    def _test(self, now: float, node: int) -> None:
        """A node that is told of completions looks again."""
        if self.plan.discipline == "event":
            passes = self._fresh(now, node)
        elif self.barrier.complete:
            passes = self._judge(node, [self._seen[peer] for peer in self.alive if peer != node])
        else:
            passes = self._judge(node, [self._seen[peer] for peer in self._held[node]])
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
        self._begin(node, now)

    # -- the barrier --------------------------------------------------------------------------------------------

    def _fresh(self, now: float, node: int) -> bool:
        """One test on everybody, or on a sample drawn now."""
        steps = self._seen if self._told else self.steps
        self._tests += 1
        if self.barrier.complete:
            self._queries += len(self.alive) - 1
            return self._judge(node, [steps[peer] for peer in self.alive if peer != node])
        beta = self._beta(node)
        self._queries += min(beta, len(self.alive) - (not self.plan.self_sampled))

        def decided(peer: int) -> bool:
            return self._lazy and not self._judge(node, (steps[peer],))

        sample = self._sampler.draw(node, beta, now, decided)
        return self._judge(node, [steps[peer] for peer in sample])

    def _judge(self, node: int, others: Sequence[int]) -> bool:
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
                living=self._is_listed,
            )
        return UniformSampler(plan.seed, self.alive, self_sampled=plan.self_sampled)

    def _is_listed(self, node: int) -> bool:
        return not self._buried[node]

    def _add_node(self, step: int) -> int:
        node = len(self.steps)
        self._durations.append(Stream(self.plan.seed, DURATIONS, node))
        self._beliefs.append(belief_factor(self.plan, node))
        self.steps.append(step)
        self._seen.append(step)
        self._completed_s.append(0.0)
        self._waited_s.append(0.0)
        self._last_pass.append(self._updates)
        self._dead.append(False)
        self._buried.append(False)
        self.alive.append(node)
        return node

    def _die(self, now: float, node: int) -> None:
        churn = self.plan.churn
        self._dead[node] = True
        self._blocked.pop(node, None)
        self._push(now + churn.detection_s, node, Kind.BURY)
        self._push(now + churn.rejoin_s, node, Kind.JOIN)

    def _bury(self, now: float, node: int) -> None:
        self._buried[node] = True
        self.alive.remove(node)
        self._sampler.changed()
        for held in self._held.values():
            if node in held:
                held.remove(node)
        if self._told:
            self._look_all(now)

    def _join(self, now: float) -> None:
        living = [self.steps[node] for node in self.alive if not self._dead[node]]
        node = self._add_node(sorted(living)[len(living) // 2] if living else 0)
        self._sampler.changed()
        self._schedule_death(now, node)
        self._begin(node, now)

    def _schedule_death(self, now: float, node: int) -> None:
        if self.plan.churn.rate > 0:
            life_s = Stream(self.plan.seed, CHURN, node).exponential() / self.plan.churn.rate
            self._push(now + life_s, node, Kind.DIE)

    # -- keeping ------------------------------------------------------------------------------------------------

    def _push(self, when: float, node: int, kind: Kind) -> None:
        heapq.heappush(self._heap, (when, node, int(kind)))

    def _keep_moments(self, now: float) -> None:
        while self._due_moments and self._due_moments[0] < now:
            self._moments.append(moment_of(self._due_moments.pop(0), self._living_steps()))

    def _living_steps(self) -> list[int]:
        return [steps for steps, dead in zip(self.steps, self._dead, strict=True) if not dead]

    def _outcome(self) -> Outcome:
        trace = None
        if self._trace is not None:
            times, nodes, gaps = self._trace
            trace = Trace(np.array(times, np.float64), np.array(nodes, np.int64), np.array(gaps, np.int64))
        waited = [waited for waited, dead in zip(self._waited_s, self._dead, strict=True) if not dead]
        return Outcome(
            plan=self.plan,
            engine="reference",
            steps=np.array(self._living_steps(), np.int64),
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
    """N̂/N of one node: log-normal with mean 1 and the plan's relative standard deviation."""
    if plan.population_error == 0.0:
        return 1.0
    variance = math.log1p(plan.population_error**2)
    return math.exp(math.sqrt(variance) * Stream(plan.seed, ESTIMATES, node).normal() - variance / 2)
