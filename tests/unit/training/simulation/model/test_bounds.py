"""The analytical bounds: golden values, and that they hold for the lags they imply."""

from __future__ import annotations

import math

import pytest

from p2pnode.training.simulation.figures import published
from p2pnode.training.simulation.model import bounds


@pytest.mark.parametrize("beta", published.BOUNDS)
def test_the_bounds_have_their_golden_values(beta: int) -> None:
    """Both bounds, r = 4, T = 10 000: minima, where they lie, and values at fixed a, to 10⁻³."""
    least_1, at_1, least_2, at_2, *fixed = published.BOUNDS[beta]
    found_1, where_1 = bounds.lowest(bounds.mean_bound, beta, 4, 10_000)
    found_2, where_2 = bounds.lowest(bounds.square_bound, beta, 4, 10_000)
    values = [bounds.mean_bound(a, bounds.share_within(a, beta), 4, 10_000) for a in (0.2, 0.5, 0.8)]
    values += [bounds.square_bound(a, bounds.share_within(a, beta), 4, 10_000) for a in (0.2, 0.5)]

    expected = [least_1, at_1, least_2, at_2, *fixed]
    for ours, theirs in zip([found_1, where_1, found_2, where_2, *values], expected, strict=True):
        assert math.isclose(ours, theirs, abs_tol=published.BOUNDS_TOLERANCE)


def test_the_bounds_hold_for_the_law_of_lags() -> None:
    """On random laws (r < 12, β < 64) the mean and the mean square of the implied lag stay below the bounds."""
    import numpy as np

    generator = np.random.default_rng(7)
    print("seed 7")
    for _ in range(300):
        r, beta, length = int(generator.integers(0, 12)), int(generator.integers(1, 64)), 400
        f = generator.random(r + 1) * generator.random()
        f /= max(1.0, f.sum() / 0.98)
        share = float(f.sum())
        a = share**beta
        law = bounds.lag_law(f, a, r, length)
        lags = np.arange(law.size)

        assert math.isclose(law.sum(), 1.0, rel_tol=1e-9)
        assert (law * lags).sum() <= bounds.mean_bound(a, share, r, length) + 1e-9
        assert (law * lags**2).sum() <= bounds.square_bound(a, share, r, length) + 1e-9
