"""The sliced kernel gives the history of a single queue, and the figures of drawn samples."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import pytest

from training.settings import BarrierSettings
from training.simulation.model.plan import Plan
from training.simulation.model.random_streams import DURATIONS, SAMPLES, RandomStream
from training.simulation.model.step_times import parse_step_times, parse_stragglers
from training.simulation.run import simulate

pytest.importorskip("numba", reason="the compiled engine is an extra: pip install p2pnode[simulate]")


SEED = 4


def plan(**changes: Any) -> Plan:
    """A small re-polled swarm; texts for step times and stragglers."""
    print(f"seed {SEED}")
    barrier = BarrierSettings(method="pssp", sample=4, staleness=changes.pop("staleness", 2))
    steps = parse_step_times(changes.pop("steps", "exp:1"))
    slow = parse_stragglers(changes.pop("slow", ""))
    usual: dict[str, Any] = {"nodes": 60, "duration_s": 30.0, "repoll_s": 0.1, "discipline": "repoll", "seed": SEED}
    return Plan(barrier=barrier, steps=steps, stragglers=slow, **(usual | changes))


def plain(swarm: Plan) -> tuple[list[tuple[float, int]], list[int], int]:
    """One heap and the same chances: completions in their order, steps, and tests of the barrier."""
    from training.simulation.engines.grouped_kernel import pass_chances

    others = swarm.nodes - (not swarm.self_sampled)
    chances = pass_chances(others, swarm.barrier.sample, swarm.barrier.quantile)
    durations = [RandomStream(swarm.seed, DURATIONS, node) for node in range(swarm.nodes)]
    samples = [RandomStream(swarm.seed, SAMPLES, node) for node in range(swarm.nodes)]
    slow = swarm.stragglers

    def seconds(node: int) -> float:
        drawn = swarm.steps.draw(durations[node])
        if slow.transient:
            return drawn * slow.factor if durations[node].uniform() < slow.share else drawn
        return drawn * slow.factor if node < slow.count(swarm.nodes) else drawn

    steps, blocked = [0] * swarm.nodes, [False] * swarm.nodes
    events = [(seconds(node), node) for node in range(swarm.nodes)]
    heapq.heapify(events)
    history: list[tuple[float, int]] = []
    tests = 0
    while events[0][0] <= swarm.duration_s:
        now, node = heapq.heappop(events)
        if not blocked[node]:
            steps[node] += 1
            history.append((now, node))
        tests += 1
        laggards = sum(other < steps[node] - swarm.barrier.staleness for other in steps)
        blocked[node] = samples[node].uniform() >= chances[laggards]
        heapq.heappush(events, (now + (swarm.repoll_s if blocked[node] else seconds(node)), node))
    return history, steps, tests


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"slow": "10%x5", "self_sampled": True},
        {"slow": "20%x3,transient", "steps": "gamma:0.5:2", "staleness": 0},
        # Longer than a year of slices, and steps of a part of a slice.
        {"steps": "lognormal:0:2", "duration_s": 60.0},
        {"steps": "0.001+exp:0.01", "duration_s": 0.5, "repoll_s": 0.0003},
        # All nodes in one part, which has too few rows at first.
        {"steps": "constant:1", "nodes": 4200, "duration_s": 1.5},
    ],
)
def test_slices_make_the_history_of_one_queue(changes: dict[str, Any]) -> None:
    """Every completion happens at the same moment on the same node as with one heap, and every count is equal."""
    swarm = plan(**changes)
    history, steps, tests = plain(swarm)
    run = simulate(swarm, engine="grouped", keep_trace=True)

    assert run.trace is not None
    assert list(run.trace.node) == [node for _, node in history]
    np.testing.assert_allclose(run.trace.completed_s, [now for now, _ in history], rtol=1e-12)
    assert list(run.steps) == steps
    assert (run.updates, run.tests, run.queries) == (len(history), tests, 4 * tests)


def test_moments_and_waiting_are_those_of_the_drawing_engine() -> None:
    """With all nodes in the sample the probability is 0 or 1: slices and drawn samples agree in every figure."""
    swarm = plan(nodes=5, self_sampled=False, slow="20%x3")
    drawn = simulate(swarm, engine="compiled", moments_s=(10.0, 20.0))
    sliced = simulate(swarm, engine="grouped", moments_s=(10.0, 20.0))

    assert list(sliced.steps) == list(drawn.steps)
    np.testing.assert_allclose(sliced.waited_s, drawn.waited_s)
    assert sliced.moments == drawn.moments
