"""Groups of nodes: their probability and distribution, against the shared predicate and single draws."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from p2pnode.training.barriers.predicates import make_barrier
from p2pnode.training.settings import BarrierSettings
from p2pnode.training.simulation.run import simulate
from tests.harness.builders.small_plans import small_plan
from tests.unit.training.barriers.test_predicates import pass_probability

pytest.importorskip("numba", reason="the compiled engine is an extra: pip install p2pnode[simulate]")


@pytest.mark.parametrize(
    ("method", "quantile", "others", "beta"), [("pbsp", 1.0, 30, 4), ("pssp", 0.75, 20, 8), ("pbsp", 0.5, 12, 12)]
)
def test_the_grouped_chance_is_that_of_the_shared_predicate(
    method: str, quantile: float, others: int, beta: int
) -> None:
    """For every number of laggards: the chance used for groups is the enumeration of samples through the predicate."""
    from p2pnode.training.simulation.engines import grouped_kernel

    shared = make_barrier(BarrierSettings(method=method, sample=beta, quantile=quantile))  # type: ignore[arg-type]
    chances = grouped_kernel.pass_chances(others, beta, quantile)

    for laggards in range(others + 1):
        assert math.isclose(chances[laggards], pass_probability(shared, others, laggards, beta), abs_tol=1e-12)


@pytest.mark.parametrize(("method", "quantile"), [("pbsp", 1.0), ("pssp", 1.0), ("pbsp", 0.6)])
def test_groups_have_the_distribution_of_single_draws(method: str, quantile: float) -> None:
    """Over forty seeds grouped and direct runs agree in mean steps, spread and tests within four standard errors."""
    base = small_plan(method, 60, 5, discipline="event", quantile=quantile, slow="10%x3", duration_s=30.0)
    figures: dict[str, list[tuple[float, float, float]]] = {"compiled": [], "reference": []}
    for seed, engine in itertools.product(range(40), figures):
        run = simulate(replace(base, seed=seed), engine=engine)  # type: ignore[arg-type]
        figures[engine].append((float(run.steps.mean()), float(run.steps.std()), run.tests / run.updates))

    one, other = np.array(figures["compiled"]), np.array(figures["reference"])
    error = np.sqrt(one.var(axis=0) / 40 + other.var(axis=0) / 40)
    assert (np.abs(one.mean(axis=0) - other.mean(axis=0)) <= 4 * error).all()
