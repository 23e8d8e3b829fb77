"""The race of `benchmarks.barriers`: what `barrier.grace` costs beside a node that is four times slower."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.barriers import NODES, Race, settings_of
from training.barriers.predicates import make_barrier
from training.settings import BarrierMethod

LONG_S = 200.0


def steps(method: BarrierMethod, grace: float, seed: int) -> list[int]:
    """Completed steps; every one is passed once, in order."""
    settings = settings_of(method)
    race = Race(make_barrier(settings), type(settings)(method=method, sample=settings.sample, grace=grace), seed)
    passed: Counter[int] = Counter()
    for now_s, node, completed in race.events():
        if now_s > LONG_S:
            return race.steps
        passed[node] += not completed
        assert race.steps[node] - passed[node] in (0, 1)
        assert race.steps[node] == passed[node] or completed
    raise AssertionError("a race never ends")


def test_grace_costs_hardly_a_step_beside_a_slow_node() -> None:
    """Of five fast nodes and a slow one, over three seeds: less than one and a half percent of the steps."""
    usual = settings_of("pssp").grace
    assert usual > 0.0
    made = {grace: sum(sum(steps("pssp", grace, seed)) for seed in range(3)) for grace in (0.0, usual)}
    print(made)
    assert made[usual] >= 0.985 * made[0.0]


@pytest.mark.parametrize("method", ["asp", "bsp"])
def test_under_asp_and_bsp_there_is_no_grace(method: BarrierMethod) -> None:
    """Every node is where it is without."""
    assert steps(method, 0.3, 1) == steps(method, 0.0, 1)
    assert len(steps(method, 0.3, 1)) == NODES
