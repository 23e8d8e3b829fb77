"""The population estimate on simulated sets of ids: its error, its interval, and a swarm that changes."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from benchmarks.overlay_population import estimate_often, theoretical_spread
from overlay.discovery.population import CONTRADICTION, RECENT, Estimator

K = 20


@pytest.mark.parametrize("nodes", [50, 200, 1000])
def test_the_estimate_has_the_theoretical_error_and_its_interval_keeps_its_word(nodes: int) -> None:
    """16 lookups: no bias beyond 2 %, the spread of theory (at most 5.6 %), 93 to 97 % covered."""
    print("seed 4")
    errors = estimate_often(4, nodes, 1000)
    print(errors)

    assert abs(errors.bias) < 0.02
    # Few nodes: the same ids answer every lookup, which theory (independent lookups) leaves out.
    assert theoretical_spread(nodes) * 0.94 < errors.spread < 0.056 * 1.06
    assert 0.93 <= errors.covered <= 0.97


@pytest.mark.parametrize("nodes", [50, 200, 1000])
def test_the_zone_count_has_no_bias(nodes: int) -> None:
    """The second estimate is right within 2 % on average."""
    print("seed 5")
    assert abs(estimate_often(5, nodes, 1000).zone_bias) < 0.02


def lookups(nodes: int, count: int, rng: random.Random) -> list[list[float]]:
    return [sorted(rng.random() for _ in range(nodes))[:K] for _ in range(count)]


def test_an_estimate_drops_what_was_before_a_change() -> None:
    """After a halving the first lookups that contradict the window replace it; the same swarm is never contradicted."""
    print("seed 6")
    rng = random.Random(6)
    estimator = Estimator(K)
    for found in lookups(1000, 24, rng):
        estimator.observe(found, 0.0)
    held = []
    for found in lookups(500, 20, rng):
        estimator.observe(found, 10.0)
        population = estimator.estimate(10.0)
        assert population is not None
        held.append(population.observations)
    print(held)

    assert min(held[: RECENT[0] + 4]) <= RECENT[0], "noticed within a dozen lookups"
    assert population.estimate == pytest.approx(500, rel=0.15)


def test_the_same_swarm_contradicts_itself_next_to_never() -> None:
    """2000 lookups of 300 nodes through one window: nothing is dropped but what is more than the window holds."""
    print("seed 7")
    rng = random.Random(7)
    estimator = Estimator(K)
    held = []
    for found in lookups(300, 2000, rng):
        estimator.observe(found, 0.0)
        population = estimator.estimate(0.0)
        assert population is not None
        held.append(population.observations)

    assert CONTRADICTION >= 4
    assert all(after >= before for before, after in pairwise(held))
