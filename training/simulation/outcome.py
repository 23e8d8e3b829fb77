"""The result of a simulated run, in the same form from every engine, and its figures (`docs/psp.md`). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from p2pnode.training.simulation.plan import Plan

Counts = NDArray[np.int64]
Seconds = NDArray[np.float64]

#: The percentiles that the published figures show.
PERCENTILES = (2, 25, 50, 75, 95)


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


def summary(outcome: Outcome) -> dict[str, Any]:
    """All figures of one run, as plain data. A query is one peer queried, which costs two messages."""
    steps = outcome.steps
    updates = max(1, outcome.updates)
    passes = max(1, outcome.passes)
    nodes = max(1, steps.size)
    busy_s = outcome.plan.duration_s * nodes
    gap = outcome.gap_sum / passes
    return {
        "nodes": int(steps.size),
        "updates": outcome.updates,
        "mean_steps": float(steps.mean()) if steps.size else 0.0,
        "sd_steps": float(steps.std()) if steps.size else 0.0,
        "least_steps": int(steps.min()) if steps.size else 0,
        "most_steps": int(steps.max()) if steps.size else 0,
        "percentiles": {str(p): float(np.percentile(steps, p)) for p in PERCENTILES} if steps.size else {},
        "progress": float(steps.mean()) * outcome.plan.steps.mean_s / outcome.plan.duration_s if steps.size else 0.0,
        "queries_per_step": outcome.queries / updates,
        "messages_per_step": 2 * outcome.queries / updates,
        "tests_per_step": outcome.tests / updates,
        "waited_s_per_step": float(outcome.waited_s.sum()) / updates,
        "waiting_share": float(outcome.waited_s.sum()) / busy_s,
        "progress_inconsistency": gap / nodes,
        "progress_inconsistency_sd": float(np.sqrt(max(0.0, outcome.gap_squares / passes - gap * gap))) / nodes,
        "engine": outcome.engine,
    }
