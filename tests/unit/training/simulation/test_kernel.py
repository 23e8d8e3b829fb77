"""The compiled engine's history is the reference engine's, event by event."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from p2pnode.training.barriers.predicates import make_barrier
from p2pnode.training.settings import BarrierSettings
from p2pnode.training.simulation import compiled
from p2pnode.training.simulation.outcome import Outcome
from p2pnode.training.simulation.plan import DISCIPLINES
from p2pnode.training.simulation.run import simulate
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
    """Every completion happens at the same time on the same node, and every count is equal, for each kind of swarm."""
    for swarm in SWARMS:
        one = small_plan(method, discipline=discipline, **swarm)
        moments = (3.0, 7.0, 50.0)
        slow = simulate(one, engine="reference", keep_trace=True, moments_s=moments)
        fast = simulate(one, engine="compiled", keep_trace=True, moments_s=moments)

        assert_equal_runs(slow, fast)


@pytest.mark.parametrize("discipline", ["event", "repoll"])
@pytest.mark.parametrize("method", ["bsp", "pbsp"])
def test_arrays_that_grow_change_nothing(discipline: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that returns after each few completions, to extend its arrays, is the run that does not."""
    plan = small_plan(method, 30, 4, discipline=discipline)
    whole = simulate(plan, engine="compiled", keep_trace=True, moments_s=(5.0, 12.5))
    monkeypatch.setattr(compiled, "ROOM", 7)

    assert_equal_runs(simulate(plan, engine="compiled", keep_trace=True, moments_s=(5.0, 12.5)), whole)


def test_the_compiled_predicate_is_the_shared_one_on_every_small_case() -> None:
    """All steps 0…3 of up to three others, every staleness 0…2 and four quantiles."""
    from p2pnode.training.simulation import kernel

    for staleness, quantile in itertools.product((0, 1, 2), (0.3, 0.5, 0.67, 1.0)):
        shared = make_barrier(BarrierSettings(method="pssp", sample=1, staleness=staleness, quantile=quantile))
        for count in range(4):
            for others in itertools.product(range(4), repeat=count):
                for mine in range(4):
                    steps, peers = np.array(others, np.int32), np.arange(count, dtype=np.int32)
                    assert kernel.passes(mine, steps, peers, staleness, quantile) == shared.passes(mine, others)


def assert_equal_runs(one: Outcome, other: Outcome) -> None:
    assert one.trace is not None
    assert other.trace is not None
    np.testing.assert_array_equal(one.trace.completed_s, other.trace.completed_s)
    np.testing.assert_array_equal(one.trace.node, other.trace.node)
    np.testing.assert_array_equal(one.steps, other.steps)
    np.testing.assert_array_equal(one.waited_s, other.waited_s)
    np.testing.assert_array_equal(one.trace.gaps, other.trace.gaps)
    counts = [(run.updates, run.passes, run.tests, run.queries, run.gap_sum, run.gap_squares) for run in (one, other)]
    assert counts[0] == counts[1]
    assert one.moments == other.moments
