"""The reference engine: common random numbers, custom barriers, delay, churn and pools."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from p2pnode.training.settings import BarrierSettings
from p2pnode.training.simulation.plan import Churn, Plan
from p2pnode.training.simulation.random_streams import RandomStream
from p2pnode.training.simulation.reference import ReferenceEngine
from p2pnode.training.simulation.run import simulate
from tests.harness.builders.small_plans import SEED, small_plan
from tools.psp.points import plan_of

pytest.importorskip("numba", reason="the compiled engine is an extra: pip install p2pnode[simulate]")


def test_the_barrier_does_not_change_how_long_a_step_takes() -> None:
    """Node and step alone decide a step's time: under asp and under bsp the first twelve of node 7 take as long."""
    stream = RandomStream(SEED, 0, 7)
    expected = [stream.exponential() for _ in range(12)]
    taken: list[float] = []
    began = {}

    class Watch:
        def started(self, now: float, node: int, step: int) -> None:
            began[node] = now

        def completed(self, now: float, node: int, step: int) -> None:
            if node == 7:
                taken.append(now - began[node])

    ReferenceEngine(small_plan("bsp", 20, 0, discipline="event", duration_s=60.0)).run(Watch())

    np.testing.assert_allclose(taken[:12], expected)


def test_a_custom_barrier_decides() -> None:
    """A custom function that never passes holds every node at its first step."""
    barrier = BarrierSettings(method="tests.harness.builders.small_plans:never", sample=2)

    run = simulate(Plan(nodes=5, barrier=barrier, duration_s=30.0, repoll_s=0.5))

    assert run.engine == "reference"
    assert (run.steps == 1).all()


def test_delay_slows_a_barrier_by_its_round_trips() -> None:
    """With constant steps under bsp each step costs a round trip, and as much again where the first answer was no."""
    quick = small_plan("bsp", 8, 0, steps="constant:1", repoll_s=0.05, duration_s=100.0)

    assert int(simulate(quick).steps.min()) >= 95
    slowed = simulate(replace(quick, delay_s=0.25))
    assert 60 <= slowed.steps.mean() <= 100 / 1.5 + 1


def test_crashed_nodes_block_a_complete_barrier_until_they_are_detected() -> None:
    """Under bsp a crash costs about its detection time; new nodes start at the median, and the size stays the same."""
    still = small_plan("bsp", 20, 0, duration_s=200.0, seed=5)
    quick = simulate(replace(still, churn=Churn(0.002, detection_s=1.0)))
    late = simulate(replace(still, churn=Churn(0.002, detection_s=10.0)))

    assert late.steps.size == quick.steps.size == 20
    assert late.steps.max() < quick.steps.max() < simulate(still).steps.max() + 1
    assert late.steps.max() - late.steps.min() <= 1


def test_waiting_and_working_fill_the_time() -> None:
    """Per node: seconds at work plus seconds waited are the whole run, but for the step in hand at the end."""
    run = ReferenceEngine(plan_of("bsp", 10, 50, steps="constant:1", slow="10%x3")).run()

    assert run.waited_s[1] + run.steps[1] * 1.0 == pytest.approx(50, abs=1.0)
    assert run.waited_s[0] == pytest.approx(0.0)
