"""The result of a simulated run, in the same form from every engine. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from p2pnode.training.simulation.model.plan import Plan

Counts = NDArray[np.int64]
Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Moment:
    """The distribution of completed steps over the live nodes at one time."""

    now_s: float
    mean: float
    sd: float
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Every completion in order: `completed_s` float64[n] and `node` int64[n]. For every pass of a barrier, `gaps`
    int64[passes] counts the completions in the swarm since that node's last pass."""

    completed_s: Seconds
    node: Counts
    gaps: Counts


@dataclass(frozen=True, slots=True)
class Outcome:
    """Completed `steps` int64[nodes] and `waited_s` float64[nodes] of the nodes that are live at the end.

    `updates` counts completions and `tests` the tests of a barrier. `queries` counts every member of every sample, as
    the published tables do. `gap_sum` and `gap_squares` sum the gaps of `Trace` and their squares.
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
        """Completions and tests of a barrier: the work of an engine."""
        return self.updates + self.tests


def moment_of(now_s: float, steps: Sequence[int] | Counts) -> Moment:
    """Summarise the completed steps of the live nodes."""
    values = np.asarray(steps)
    if not values.size:
        return Moment(now_s, 0.0, 0.0, 0, 0)
    return Moment(now_s, float(values.mean()), float(values.std()), int(values.min()), int(values.max()))
