"""The convergence bounds of the PSP chapter (`docs/psp.md`), equations 1 to 3, and their distribution of lags.

`r` is the staleness and `T` the length of the update sequence. `F(r)` is the share of peers at most r steps behind, and
`a = F(r)^β` the probability that a whole sample is. The lag between the true and the noisy sequence at update t is γ_t.
Pure.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


def share_within(a: float, beta: int) -> float:
    """F(r), from `a = F(r)^β`."""
    return float(a ** (1.0 / beta))


def normaliser(a: float, share: float, r: int, length: int) -> float:
    """S = (1 − a) / (F(r)(1 − a) + a − a^(T−r+1)), for 0 < a < 1."""
    return (1.0 - a) / (share * (1.0 - a) + a - a ** (length - r + 1))


def mean_bound(a: float, share: float, r: int, length: int) -> float:
    """B1 ≥ (1/T) Σ E(γ_t)."""
    return normaliser(a, share, r, length) * (r * (r + 1) / 2 + a * (r + 2) / (1 - a) ** 2)


def square_bound(a: float, share: float, r: int, length: int) -> float:
    """B2 > (1/T) Σ E(γ_t²)."""
    body = r * (r + 1) * (2 * r + 1) / 6 + a * (r * r + 4) / (1 - a) ** 3
    return normaliser(a, share, r, length) * body


def lag_law(f: Values, a: float, r: int, length: int) -> Values:
    """The distribution of lags, float64[T + 1]: S·f(n) up to r, then S·a^(n−r). `f` is float64[≥ r + 1]."""
    scale = normaliser(a, float(f[: r + 1].sum()), r, length)
    tail = a ** np.arange(1, length - r + 1, dtype=np.float64)
    return np.concatenate([scale * f[: r + 1], scale * tail])


def lowest(bound: Callable[[float, float, int, int], float], beta: int, r: int, length: int) -> tuple[float, float]:
    """The least value of a bound over `a`, and that `a` to three decimal places."""
    grid = np.arange(1, 1000) / 1000.0
    values = [bound(float(a), share_within(float(a), beta), r, length) for a in grid]
    place = int(np.argmin(values))
    return values[place], float(grid[place])
