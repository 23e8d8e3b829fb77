"""Random streams: SplitMix64 against its published numbers, and the distributions made of it."""

from __future__ import annotations

import numpy as np
import pytest

from p2pnode.training.simulation.random_streams import DURATIONS, GAMMA, MASK, SAMPLES, RandomStream, mixed


def test_the_generator_is_splitmix64() -> None:
    """The first outputs from the state 1234567, as published with the reference implementation."""
    state, found = 1234567, []
    for _ in range(3):
        state = (state + GAMMA) & MASK
        found.append(mixed(state))

    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_streams_differ_by_seed_purpose_and_node_and_repeat() -> None:
    """Each of the three gives another stream; the same three give the same."""
    found = {
        (seed, purpose, node): tuple(RandomStream(seed, purpose, node).uniform() for _ in range(1))
        for seed in (1, 2)
        for purpose in (DURATIONS, SAMPLES)
        for node in (0, 1)
    }

    assert len(set(found.values())) == len(found)
    assert RandomStream(2, SAMPLES, 1).uniform() == found[2, SAMPLES, 1][0]


@pytest.mark.parametrize(
    ("name", "mean", "variance"), [("uniform", 0.5, 1 / 12), ("exponential", 1, 1), ("normal", 0, 1)]
)
def test_a_distribution_has_its_mean_and_variance(name: str, mean: float, variance: float) -> None:
    """20,000 draws: the mean within four standard errors, the variance within a tenth."""
    stream = RandomStream(3, DURATIONS, 0)
    draws = np.array([getattr(stream, name)() for _ in range(20_000)])

    assert abs(draws.mean() - mean) <= 4 * (variance / draws.size) ** 0.5
    assert draws.var() == pytest.approx(variance, rel=0.1)


def test_below_gives_each_number_equally_often() -> None:
    """7,000 draws below 7: each number about a thousand times."""
    stream = RandomStream(4, SAMPLES, 0)
    counts = np.bincount([stream.below(7) for _ in range(7000)], minlength=7)

    assert counts.size == 7
    assert abs(counts - 1000).max() < 150
