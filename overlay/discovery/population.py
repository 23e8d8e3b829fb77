"""Estimates the number of nodes from the density of their ids near random targets.

The estimate is a corrected maximum likelihood, pooled over a sliding window of lookups of random targets, with a 95 %
interval. A lookup that finds fewer than k nodes has found all: then the count is exact. When the newest lookups
contradict the older ones, the swarm has changed and the older ones are dropped. The distances include the own id where
it belongs.

Pure. `now` in seconds is an argument.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

#: Lookups older than this no longer count: a training swarm changes within minutes.
WINDOW_S = 120.0
#: More lookups than this make the estimate slower, not better: the ids themselves are one sample (see `_spread`).
WINDOW_LOOKUPS = 64
#: This many of the newest lookups are compared with the rest; the first eight are enough to show a halving.
RECENT = (8, 16)
#: Standard deviations between the two that count as a contradiction: by chance this almost never happens.
CONTRADICTION = 5.0
#: The variance that more lookups do not remove, in units of (1 - k/n) / (k n): fitted to simulated id sets.
ID_SET_VARIANCE = 1.5
#: Two-sided 95 % of the normal distribution.
Z_95 = 1.959964


@dataclass(frozen=True, slots=True)
class Population:
    """Number of nodes, this one included. `observations` counts the lookups behind it; `exact` means counted."""

    estimate: float
    low: float
    high: float
    exact: bool
    observations: int
    zone_estimate: float | None = None


def counted(nodes: int, observations: int = 0) -> Population:
    """The population when every node is known."""
    return Population(float(nodes), float(nodes), float(nodes), True, observations, float(nodes))


class Estimator:
    """Pools the `k` smallest distances of each lookup, relative to the id space, in (0, 1]."""

    def __init__(self, k: int) -> None:
        if k < 3:
            raise ValueError(f"k = {k}: the estimator needs at least 3 nodes per lookup")
        self.k = k
        #: The lookups, the newest last: when each ended, and its distances, closest first.
        self._lookups: list[tuple[float, list[float]]] = []

    def observe(self, distances: Sequence[float], now: float) -> None:
        """One completed lookup of a uniformly random target. Fewer than `k` distances mean that these are all."""
        self._lookups.append((now, sorted(distances)[: self.k]))
        del self._lookups[:-WINDOW_LOOKUPS]
        self._drop_contradicted()

    def estimate(self, now: float) -> Population | None:
        """The estimate from the lookups in the window; None before the first."""
        self._lookups = [(at, distances) for at, distances in self._lookups if now - at <= WINDOW_S]
        if not self._lookups:
            return None
        newest = self._lookups[-1][1]
        if len(newest) < self.k:
            return counted(len(newest), len(self._lookups))
        full = self._since_last_short()
        lookups = len(full)
        total = sum(distances[-1] for distances in full)
        # Golden table: (L k - 1) / Σd_k is high by 1 - 1/L nodes.
        estimate = max((lookups * self.k - 1) / total - (1 - 1 / lookups), float(self.k))
        low, high = _interval(estimate, total, lookups * self.k, self.k)
        return Population(estimate, low, high, False, lookups, zone_estimate(estimate, self.k, full))

    def _drop_contradicted(self) -> None:
        """Drop the lookups from before a change of the swarm.

        `d_k` of a lookup times n is Gamma(k). By the delta method, the logarithm of the ratio of two means over i and j
        lookups has the variance 1/(k i) + 1/(k j).
        """
        full = self._since_last_short()
        for recent in RECENT:
            older = len(full) - recent
            if older < RECENT[0]:
                return
            new = sum(distances[-1] for distances in full[:recent]) / recent
            old = sum(distances[-1] for distances in full[recent:]) / older
            deviation = math.sqrt((1 / recent + 1 / older) / self.k)
            if abs(math.log(new / old)) > CONTRADICTION * deviation:
                del self._lookups[:-recent]
                return

    def _since_last_short(self) -> list[list[float]]:
        """The distances of the lookups after the last one that found all, the newest first."""
        newest_first = (distances for _, distances in reversed(self._lookups))
        return list(takewhile(lambda distances: len(distances) == self.k, newest_first))


def _interval(estimate: float, total: float, count: int, k: int) -> tuple[float, float]:
    """95 % interval: N·Σd_k is Gamma(count), narrowed for small swarms and widened by the spread of the ids themselves.

    The same ids answer every lookup, so the error does not fall to zero with more lookups. For n ids the mean of the
    local 1/density keeps a relative variance of about 1.5 (1 - k/n) / (k n). This is a second-order effect; the factor
    is fitted, and checked by simulation in the tests.
    """
    finite = math.sqrt(max(0.0, 1 - (k - 1) / estimate))
    floor = ID_SET_VARIANCE * finite**2 / (k * estimate)
    low = _gamma_quantile(count, -Z_95) / total
    high = _gamma_quantile(count, Z_95) / total
    below = max(0.0, estimate - low) * finite
    above = max(0.0, high - estimate) * finite
    extra = Z_95 * estimate * math.sqrt(floor)
    return max(float(k), estimate - math.hypot(below, extra)), estimate + math.hypot(above, extra)


def _gamma_quantile(shape: float, z: float) -> float:
    """Quantile of Gamma(shape, 1) at the normal deviate `z` (Wilson and Hilferty 1931; error < 0.5 % from shape 10)."""
    spread = 1 / (9 * shape)
    return shape * (1 - spread + z * math.sqrt(spread)) ** 3


def zone_estimate(expected: float, k: int, lookups: Sequence[Sequence[float]]) -> float | None:
    """A second, independent estimate: the nodes under a prefix of `z` bits, times 2^z.

    A zone is the ball of radius 2^-z around a lookup's target. `z` is chosen from `expected` so that a zone holds about
    half of what a lookup returns. A zone that holds all `k` may be cut off; it is counted as it is.
    """
    bits = max(0, round(math.log2(max(expected, 1.0) / (k / 2))))
    if bits == 0 or not lookups:
        return None
    radius = 0.5**bits
    inside = sum(bisect_right(distances, radius) for distances in lookups)
    return float(inside * 2**bits) / len(lookups)
