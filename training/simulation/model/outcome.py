"""What a simulated run leaves behind, the same from both engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from training.simulation.model.plan import Plan

Counts = NDArray[np.int64]
Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Moment:
    """Completed steps over the living nodes at one moment."""

    now_s: float
    mean: float
    sd: float
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Every completion in its order: `completed_s` float64[n], `node` int64[n]; and for every pass of a barrier how
    many steps the swarm had completed since that node's last one: `gaps` int64[passes]."""

    completed_s: Seconds
    node: Counts
    gaps: Counts


@dataclass(frozen=True, slots=True)
class Outcome:
    """`steps` int64[nodes] completed and `waited_s` float64[nodes], of the nodes living at the end.

    `updates` counts completions, `tests` tests of a barrier, `queries` peers asked in them (every member of a sample,
    each time: what the published tables count). `gap_sum` and `gap_squares` sum the gaps of `Trace` and their squares.
    """

    plan: Plan
    engine: str
    steps: Counts
    waited_s: Seconds
    updates: int
    passes: int
    tests: int
    queries: int
    gap_sum: int
    gap_squares: float
    moments: tuple[Moment, ...] = ()
    trace: Trace | None = None

    @property
    def events(self) -> int:
        """Completions and tests of a barrier: what an engine has to work through."""
        return self.updates + self.tests


def moment_of(now_s: float, steps: Sequence[int] | Counts) -> Moment:
    """Sums up the completed steps of the living nodes."""
    values = np.asarray(steps)
    if not values.size:
        return Moment(now_s, 0.0, 0.0, 0, 0)
    return Moment(now_s, float(values.mean()), float(values.std()), int(values.min()), int(values.max()))
