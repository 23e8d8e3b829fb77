"""The parameter server of the literature's listing: a single thread that adds deltas, tests barriers, and evaluates.

The server adds one push at a time, and then tests the barrier of every blocked worker. If any passes, it *evaluates the
model* before it sends it out; other pushes wait meanwhile. The published accuracy is plotted over these evaluations:
with six workers one evaluation covers one delta under asp, and six under bsp.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from p2pnode.training.simulation.learning.learning import Curve
from p2pnode.training.simulation.learning.problems import Problem, Vector
from p2pnode.training.simulation.model.plan import Plan
from p2pnode.training.simulation.model.random_streams import DURATIONS, RandomStream
from p2pnode.training.simulation.model.samplers import UniformSampler


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
