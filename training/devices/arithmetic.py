"""The arithmetic of the distributed step inside one node, on what its trainers have in shared memory. Pure.

All positions are `float32[total]`, relative to the shared vector with which the step of the swarm began. Model: LSGD
(Teng et al., NeurIPS 2019, arXiv 1905.10395).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from p2pnode.training.trainer_link.interface import StepReport, Vector


def weights_of(reports: Mapping[int, StepReport]) -> dict[int, float]:
    """The share of each trainer in the mean: its samples, or its optimiser steps where nobody counts samples."""
    amounts = {index: float(report.samples) for index, report in reports.items()}
    if not any(amounts.values()):
        amounts = {index: float(report.optimizer_steps) for index, report in reports.items()}
    total = sum(amounts.values())
    if not total:
        return {index: 1.0 / len(amounts) for index in amounts}
    return {index: amount / total for index, amount in amounts.items()}


def weighted_mean(parts: Iterable[tuple[float, Vector]], into: Vector) -> None:
    """Write Σ weight · part into `into`; no part may be `into`."""
    into[:] = 0.0
    for weight, part in parts:
        if weight:
            into += np.float32(weight) * part


def is_finite(values: Vector) -> bool:
    """Whether every value is; a sum that overflows is looked into."""
    with np.errstate(over="ignore", invalid="ignore"):
        return math.isfinite(float(values.sum(dtype=np.float64))) or bool(np.isfinite(values).all())


def leader_of(losses: Mapping[int, float | None]) -> int | None:
    """The trainer with the lowest running loss, of equal ones the first; None where no loss is finite."""
    eligible = [(loss, index) for index, loss in losses.items() if loss is not None and math.isfinite(loss)]
    return min(eligible)[1] if eligible else None


def pull(position: Vector, leader: Vector, share: float) -> None:
    """x ← (1 − share) · x + share · leader, in place. The leader itself stays where it is."""
    if share and position is not leader:
        position += np.float32(share) * (leader - position)


def combined(step: int, reports: Sequence[StepReport], seconds: float) -> StepReport:
    """One report of all that the trainers of a node did in a step: losses and metrics weighted by samples."""
    weights = list(weights_of(dict(enumerate(reports))).values())
    trained = [(weight, one) for weight, one in zip(weights, reports, strict=True) if weight]
    names = dict.fromkeys(name for _, one in trained for name in one.metrics)
    metrics = {
        name: _mean((weight, one.metrics[name]) for weight, one in trained if name in one.metrics) for name in names
    }
    return StepReport(
        step,
        _mean((weight, one.loss) for weight, one in trained),
        sum(one.samples for one in reports),
        sum(one.optimizer_steps for one in reports),
        seconds,
        metrics,
    )


def _mean(rows: Iterable[tuple[float, float]]) -> float:
    """The weighted mean; NaN without a row."""
    known = list(rows)
    total = math.fsum(weight for weight, _ in known)
    return math.fsum(weight * value for weight, value in known) / total if total else math.nan
