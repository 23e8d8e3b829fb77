"""Learning in a simulated swarm, by the two rules of the literature.

`learn` observes the reference engine and follows Ninox (`docs/psp.md`): the deltas of all nodes that pass a barrier at
the same time are added then, and these nodes compute from that model. Every delta is one step late.

`learn_at_server` is the parameter server of the chapter's listing, a single thread. It adds one push at a time, and
then tests the barrier of every blocked worker. If any passes, it *evaluates the model* before it sends it out; other
pushes wait meanwhile. The published accuracy is plotted over these evaluations: with six workers one evaluation covers
one delta under asp, and six under bsp.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from p2pnode.training.simulation.outcome import Outcome
from p2pnode.training.simulation.plan import Plan
from p2pnode.training.simulation.random_streams import DURATIONS, RandomStream
from p2pnode.training.simulation.reference import ReferenceEngine
from p2pnode.training.simulation.samplers import UniformSampler
from tools.psp.problems import Problem, Vector


@dataclass(slots=True)
class Curve:
    """Scores against time and against updates, at equal intervals of one of them."""

    now_s: list[float] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)
    score: list[float] = field(default_factory=list)

    def note(self, now_s: float, updates: int, score: float) -> None:
        self.now_s.append(now_s)
        self.updates.append(updates)
        self.score.append(score)


class Learner:
    """Observes one run. The model is scored every `every_s` virtual seconds, and at the end by `finish`."""

    def __init__(self, problem: Problem, every_s: float) -> None:
        self.problem = problem
        self.curve = Curve()
        self.updates = 0
        self._every_s = every_s
        self._due_s = 0.0
        self._model = problem.initial()
        self._bases: dict[int, Vector] = {}
        self._pending: dict[int, Vector] = {}
        self._begun: list[int] = []
        self._moment_s = 0.0

    def started(self, now: float, node: int, step: int) -> None:  # noqa: ARG002  (an observer)
        """The node pulls. Nodes that start at the same time start from the same model."""
        self._advance(now)
        if node in self._pending:
            self._model += self._pending.pop(node)
            self.updates += 1
        self._begun.append(node)

    def completed(self, now: float, node: int, step: int) -> None:
        """The node pushes its delta."""
        self._advance(now, at_once=True)
        self._pending[node] = self.problem.delta(self._bases.pop(node), node, step)

    def finish(self, now: float) -> Curve:
        """Score the final model, and return the curve."""
        self._advance(now, at_once=True)
        self.curve.note(now, self.updates, self.problem.score(self._model))
        return self.curve

    def _advance(self, now: float, *, at_once: bool = False) -> None:
        """Fix the base of nodes that started at an earlier time, and score the model when due."""
        if self._begun and (at_once or now > self._moment_s):
            base = self._model.copy()
            self._bases |= dict.fromkeys(self._begun, base)
            self._begun.clear()
        self._moment_s = now
        while self._due_s < now:
            self.curve.note(self._due_s, self.updates, self.problem.score(self._model))
            self._due_s += self._every_s


def learn(plan: Plan, problem: Problem, *, scores: int = 40) -> tuple[Outcome, Curve]:
    """Run a plan with a problem; the model is scored `scores` times. Diverging is a result, not an error."""
    learner = Learner(problem, plan.duration_s / scores)
    with np.errstate(over="ignore", invalid="ignore"):
        outcome = ReferenceEngine(plan).run(learner)
        return outcome, learner.finish(plan.duration_s)


@dataclass(frozen=True, slots=True)
class Server:
    """Seconds of a worker's computation, in addition to the plan's step time, and of an evaluation."""

    computes_s: float
    evaluates_s: float


def learn_at_server(plan: Plan, server: Server, problem: Problem | None) -> tuple[Curve, float]:
    """The curve over evaluations, and the mean of completed steps; without a problem its scores are 0."""
    barrier = plan.made_barrier()
    workers = list(range(plan.nodes))
    delays = [RandomStream(plan.seed, DURATIONS, worker) for worker in workers]
    sampler = UniformSampler(plan.seed, workers, self_sampled=plan.self_sampled)
    model = problem.initial() if problem else None
    bases: dict[int, Vector | None] = dict.fromkeys(workers, None if model is None else model.copy())
    steps = [0] * plan.nodes
    blocked: list[int] = []
    curve = Curve()
    pushes: list[tuple[float, int]] = []

    def begin(worker: int, now: float) -> None:
        heapq.heappush(pushes, (now + server.computes_s + plan.steps.draw(delays[worker]), worker))

    def passes(worker: int) -> bool:
        if not barrier.samples:
            return True
        if barrier.complete:
            sample = [other for other in workers if other != worker]
        else:
            sample = sampler.draw(worker, plan.barrier.sample, now, lambda _peer: False)
        return barrier.passes(steps[worker], [steps[other] for other in sample])

    for worker in workers:
        begin(worker, 0.0)
    free_s = 0.0
    while True:
        pushed_s, worker = heapq.heappop(pushes)
        now = max(pushed_s, free_s)
        if now > plan.duration_s:
            return curve, sum(steps) / plan.nodes
        base = bases[worker]
        steps[worker] += 1
        if problem is not None and model is not None and base is not None:
            model += problem.delta(base, worker, steps[worker])
        blocked.append(worker)
        passing = [waiting for waiting in blocked if passes(waiting)]
        if not passing:
            free_s = now
            continue
        curve.note(now, len(curve.updates) + 1, 0.0 if problem is None or model is None else problem.score(model))
        free_s = now + server.evaluates_s
        handed_out = None if model is None else model.copy()
        for waiting in passing:
            blocked.remove(waiting)
            bases[waiting] = handed_out
            begin(waiting, free_s)
