"""The compiled engine's history is the reference engine's, event by event."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from p2pnode.training.simulation.engines.compiled import can_group
from p2pnode.training.simulation.model.outcome import Outcome
from p2pnode.training.simulation.model.plan import DISCIPLINES
from p2pnode.training.simulation.run import simulate, why_not_compiled
from tests.harness.builders.small_plans import small_plan

pytest.importorskip("numba", reason="the compiled engine is an extra: pip install p2pnode[simulate]")


SWARMS: list[dict[str, Any]] = [
    {"nodes": 20, "sample": 3},
    {"nodes": 40, "sample": 3, "slow": "20%x3"},
    {"nodes": 15, "sample": 14, "self_sampled": True},
    {"nodes": 30, "sample": 3, "quantile": 0.7, "steps": "gamma:0.5:2"},
    {"nodes": 60, "sample": 0, "population_error": 0.5, "slow": "10%x3,transient", "steps": "lognormal:0:0.4",
     "pool_size": 20, "pool_renewal_s": 3.0},
    {"nodes": 30, "sample": 4, "steps": "0.2+gamma:3:0.3", "pool_size": 10, "pool_renewal_s": 3.0},
    {"nodes": 1, "sample": 4, "steps": "constant:1"},
]  # fmt: skip


@pytest.mark.parametrize("discipline", DISCIPLINES)
@pytest.mark.parametrize("method", ["asp", "bsp", "ssp", "pbsp", "pssp"])
def test_the_compiled_history_is_the_reference_history(discipline: str, method: str) -> None:
    """Every completion happens at the same time on the same node, and every count is equal, for each kind of swarm
    that is not grouped."""
    compared = 0
    for swarm in SWARMS:
        one = small_plan(method, discipline=discipline, **swarm)
        if why_not_compiled(one) or can_group(one):
            assert one.barrier.quantile < 1.0 or discipline == "event"
            continue
        moments = (3.0, 7.0, 50.0)
        slow = simulate(one, engine="reference", keep_trace=True, moments_s=moments)
        fast = simulate(one, engine="compiled", keep_trace=True, moments_s=moments)

        assert_equal_runs(slow, fast)
        compared += 1
    assert compared >= (1 if discipline == "event" else len(SWARMS) - 1)


def assert_equal_runs(one: Outcome, other: Outcome) -> None:
    assert one.trace is not None
    assert other.trace is not None
    np.testing.assert_array_equal(one.trace.completed_s, other.trace.completed_s)
    np.testing.assert_array_equal(one.trace.node, other.trace.node)
    np.testing.assert_array_equal(one.steps, other.steps)
    np.testing.assert_array_equal(one.waited_s, other.waited_s)
    assert sorted(one.trace.gaps) == sorted(other.trace.gaps)
    counts = [(run.updates, run.passes, run.tests, run.queries, run.gap_sum) for run in (one, other)]
    assert counts[0] == counts[1]
    for here, there in zip(one.moments, other.moments, strict=True):
        assert (here.now_s, here.least, here.most) == (there.now_s, there.least, there.most)
        assert math.isclose(here.mean, there.mean, abs_tol=1e-9)
        assert math.isclose(here.sd, there.sd, abs_tol=1e-6)
