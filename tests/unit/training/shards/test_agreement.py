"""The rate of sparse deltas."""

from __future__ import annotations

import math

import numpy as np
import pytest

from p2pnode.training.shards.agreement import Agreement

SIZE, SEED = 20_000, 7
rng = np.random.default_rng(SEED)


def noise() -> np.ndarray:
    return rng.standard_normal(SIZE).astype(np.float32)


@pytest.mark.parametrize("workers", [2, 4, 9])
@pytest.mark.parametrize("common", [0.0, 0.5, 1.0, 1e3])
def test_the_mean_of_the_deltas_is_made_as_long_as_one_of_them(workers: int, common: float) -> None:
    """Deltas with a common part of any length: the rate times the length of their mean is the length of one."""
    shared, value = common * noise(), noise()
    deltas = [shared + noise() for _ in range(workers)]
    mean = np.mean(deltas, axis=0)
    agreement = Agreement()
    agreement.begin_step(deltas[0])
    for first in range(0, SIZE, 7_000):
        part = slice(first, first + 7_000)
        agreement.note(first, value[part], (value + np.float32(0.3) * mean)[part])

    rate = agreement.rate(workers)

    assert 1.0 <= rate <= math.sqrt(workers), f"seed {SEED}"
    assert rate * np.linalg.norm(mean) == pytest.approx(np.linalg.norm(deltas[0]), rel=0.05), f"seed {SEED}"


def test_nothing_is_added_faster_before_something_is_known() -> None:
    """Without a pull, and after one that changed nothing, the rate is 1; alone it is always 1."""
    agreement = Agreement()
    assert agreement.rate(4.0) == 1.0
    agreement.begin_step(noise())
    assert agreement.rate(4.0) == 1.0
    value = noise()
    agreement.note(0, value, value + noise())
    assert agreement.rate(0.5) == 1.0
    assert agreement.rate(4.0) == 2.0


@pytest.mark.parametrize("says_nothing", [None, np.full(SIZE, np.nan, np.float32)])
def test_a_pull_without_a_delta_says_nothing(says_nothing: np.ndarray | None) -> None:
    """A joiner's pull, that of final values, and one after a delta that is not finite leave what is known."""
    agreement, value, delta = Agreement(), noise(), noise()
    agreement.begin_step(delta)
    agreement.note(0, value, value + delta)
    assert agreement.rate(4.0) == pytest.approx(1.0, abs=1e-3)
    agreement.begin_step(says_nothing)
    agreement.note(0, value, value + noise())
    assert agreement.rate(4.0) == pytest.approx(1.0, abs=1e-3)
