"""The range in which training lives: what may be added, at first and after others."""

from __future__ import annotations

import numpy as np
import pytest

from p2pnode.training.shards.delta_range import (
    MAX_LENGTH,
    MEAN_ALWAYS,
    RANGE_MULTIPLE,
    has_length,
    is_delta_in_range,
    is_usual_at_first,
    longest,
)

LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize("bad", [LARGEST, -LARGEST, 1e16, np.inf, -np.inf, np.nan])
def test_a_delta_that_could_bring_a_value_near_infinity_is_out_of_range(bad: float) -> None:
    """Also one whose squares overflow, and one of zeros but for that value."""
    values = np.zeros(100, np.float32)
    assert is_delta_in_range(values)
    values[7] = bad
    assert not is_delta_in_range(values)


def test_the_sum_of_many_longest_deltas_is_finite() -> None:
    """A million of them, with the weight 1."""
    assert np.isfinite(np.float32(MAX_LENGTH) * np.float32(1e6))
    values = np.full(4, MAX_LENGTH / 2, np.float32)
    assert has_length(values, 1.001 * MAX_LENGTH)
    assert not has_length(values, 0.999 * MAX_LENGTH)


def test_a_delta_is_compared_with_those_of_the_others() -> None:
    """A thousand times as long is the bound; where the others are nearly zero it is a root mean square."""
    assert longest(100, 5.0) == 5.0 * RANGE_MULTIPLE
    assert longest(100, 1e-9) == MEAN_ALWAYS * 10.0
    assert longest(100, 1e14) == MAX_LENGTH
    assert is_usual_at_first(100, 99.0)
    assert not is_usual_at_first(100, 101.0)
