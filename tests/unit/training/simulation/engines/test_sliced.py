"""The sliced engine: a run in small budgets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from training.settings import BarrierSettings
from training.simulation.model.plan import Plan
from training.simulation.model.step_times import parse_step_times, parse_stragglers

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


def test_the_end_of_a_budget_changes_nothing() -> None:
    """A run that returns after each few completions equals the run that does not."""
    from training.simulation.engines.sliced import SlicedEngine

    swarm = plan(nodes=300, duration_s=20.0)
    moments_s = (5.0, 12.5)
    whole = SlicedEngine(swarm, moments_s).run()
    pieces = SlicedEngine(swarm, moments_s)
    pieces.budget = 7
    broken = pieces.run()

    assert list(broken.steps) == list(whole.steps)
    np.testing.assert_array_equal(broken.waited_s, whole.waited_s)
    assert broken.moments == whole.moments
    assert (broken.tests, broken.gap_sum) == (whole.tests, whole.gap_sum)
