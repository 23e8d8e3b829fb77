"""Where each trainer of a node stands during a step of the swarm, and where the node does: their weighted mean.

A step begins at `vector + carried`. The trainers of a cycle begin at their *starts* and end at start + delta; both are
`float32[total]`, relative to the vector. With `average` all go on from their mean. With `leader` each keeps its own
distance from the mean, also over the exchange with the swarm, and is pulled to the leader (LSGD: Teng et al., NeurIPS
2019, arXiv 1905.10395). Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from p2pnode.training.trainer_link.interface import Ranges, StepReport, Vector


class AveragePositions:
    """All trainers stand where their mean is."""

    def __init__(self, total: int) -> None:
        self._carried = np.zeros(total, np.float32)
        self._start = np.zeros(total, np.float32)
        self._mean = np.zeros(total, np.float32)
        self._late: list[tuple[StepReport, Vector]] = []
        #: The trainer that leads; here none does.
        self.leader: int | None = None
        self.leader_loss: float | None = None
        self.leading: Vector | None = None
        #: Whether the next cycle begins elsewhere than at the vector.
        self.is_elsewhere = False

    def begin(self, carried: Vector | None, vector: Vector) -> None:  # noqa: ARG002 - as in `LeaderPositions`
        """A step of the swarm begins, with so much beside the vector; None: nothing."""
        self._carried[:] = 0.0 if carried is None else carried
        self._start[:] = self._carried
        self.is_elsewhere = carried is not None

    def start(self, index: int) -> Vector:  # noqa: ARG002
        """Where this trainer begins its next cycle, relative to the vector."""
        return self._start

    def combine(
        self,
        reports: Mapping[int, StepReport],
        deltas: Mapping[int, Vector],
        *,
        is_last: bool = True,  # noqa: ARG002
    ) -> None:
        """The distributed step: what these trainers have trained since their starts. `is_last`: of the swarm's step."""
        parts = [(reports[index], deltas[index]) for index in reports] + self._late
        self._late = []
        self.is_elsewhere = True
        if len(parts) == 1:  # a collective has made the mean
            self._start += parts[0][1]
            return
        weights = weights_of(dict(enumerate(report for report, _ in parts)))
        weighted_mean(((weights[place], delta) for place, (_, delta) in enumerate(parts)), self._mean)
        self._start += self._mean

    def late(self, index: int, report: StepReport, delta: Vector) -> None:  # noqa: ARG002
        """What a trainer has trained in an earlier cycle, which went on without it: it counts in the next one."""
        self._late.append((report, delta.copy()))

    def forget(self, index: int) -> None:
        """A trainer has begun anew: it begins where the others do."""

    def follow(self, values: Vector | None) -> None:
        """Nobody is followed."""

    def delta(self, into: Vector) -> None:
        """What the node has trained in this step: the way of the mean."""
        np.subtract(self._start, self._carried, out=into)


class LeaderPositions:
    """Each trainer has a position of its own, and follows the one with the lowest running loss.

    `leaders`: the absolute values of the node's leader, and of the swarm's where nodes have one in common. The trainers
    read both. `c1`, `c2`: the pulls to them.
    """

    #: No trainer begins at the vector.
    is_elsewhere = True

    def __init__(self, total: int, leaders: list[Vector], c1: float, c2: float = 0.0) -> None:
        self._carried = np.zeros(total, np.float32)
        self._mean = np.zeros(total, np.float32)
        self._vector = np.zeros(total, np.float32)
        self._starts: dict[int, Vector] = {}
        self._local = leaders[0]
        self._whole = leaders[1] if len(leaders) > 1 else None
        self._c1, self._c2 = c1, c2
        #: Whether the memory of the leaders holds values, of the last steps.
        self.has_local = self.has_global = False
        self.leader: int | None = None
        self.leader_loss: float | None = None

    def begin(self, carried: Vector | None, vector: Vector) -> None:
        """A step of the swarm begins: the mean moves to it, and each trainer keeps its distance from the mean."""
        self._vector[:] = vector
        before = self._mean.copy()
        self._carried[:] = 0.0 if carried is None else carried
        for index in self._starts:
            self._starts[index] += self._carried - before
        self._mean[:] = self._carried

    def start(self, index: int) -> Vector:
        """Where this trainer begins its next cycle, relative to the vector. A new one begins at the mean."""
        if index not in self._starts:
            self._starts[index] = self._mean.copy()
        return self._starts[index]

    def follow(self, values: Vector | None) -> None:
        """The values of the swarm's leader, as of its last distributed step; None: they are those of this node's."""
        if self._whole is not None and (values is not None or self.has_local):
            np.copyto(self._whole, self._local if values is None else values)
            self.has_global = True

    @property
    def leading(self) -> Vector | None:
        """The values of this node's leader; None before there is one."""
        return self._local if self.has_local else None

    def combine(self, reports: Mapping[int, StepReport], deltas: Mapping[int, Vector], *, is_last: bool = True) -> None:
        """The distributed step: the positions reached, the mean of them, and the pull to the leader. In the last one of
        the swarm's step follows the pull to the swarm's leader."""
        for index in reports:
            self._starts[index] = self.start(index) + deltas[index]
        self.leader = leader_of({index: report.recent_loss for index, report in reports.items()})
        if self.leader is not None:
            self.leader_loss = reports[self.leader].recent_loss
            ahead = self._starts[self.leader]
            for index in reports:
                pull(self._starts[index], ahead, self._c1)
            np.add(self._vector, ahead, out=self._local)
            self.has_local = True
        if is_last and self._c2 and self.has_global and self._whole is not None:
            whole = self._whole - self._vector
            for index in reports:
                pull(self._starts[index], whole, self._c2)
        weights = weights_of(reports)
        weighted_mean(((weights[index], self._starts[index]) for index in reports), self._mean)

    def late(self, index: int, report: StepReport, delta: Vector) -> None:  # noqa: ARG002
        """What a trainer has trained in an earlier cycle, which went on without it: it stands there."""
        self._starts[index] = self.start(index) + delta

    def delta(self, into: Vector) -> None:
        """What the node has trained in this step: the way of the mean."""
        np.subtract(self._mean, self._carried, out=into)

    def forget(self, index: int) -> None:
        """A trainer has begun anew: it has no position of its own."""
        self._starts.pop(index, None)


Positions = AveragePositions | LeaderPositions


class NodeBase:
    """The base of a node with several trainers, and its progress beyond it: as `training.trainer.model.vector` of one
    trainer. The trainers of a cycle load shared values, and begin `carried` beyond them: the node's deltas that those
    values lack, and its progress.

    `vector` and `delta` are the node's, which the exchange uses; trainers load `shared`. All `float32[total]`.
    """

    def __init__(self, vector: Vector, delta: Vector, shared: Vector) -> None:
        self._vector = vector
        self._delta = delta
        self._shared = shared
        self._progress = np.zeros_like(vector)
        #: What of the node's deltas the shared values lack.
        self._ahead = np.zeros_like(vector)
        #: How far the node comes in a step.
        self.way = np.zeros_like(vector)
        # The kernel gives fresh memory page by page, which took longer than all of a step's additions.
        self._carried = np.zeros_like(vector)
        #: From a cut to the arrival of the values that contain it.
        self.is_exchanging = False
        #: `delta` holds what goes to the owners of the last cut, and the base has not got it yet.
        self.is_encoded = False
        self.known_step = 0

    def carried(self) -> Vector | None:
        """Where the trainers begin, beyond the shared values; until the next call."""
        self._add_to_base()
        np.add(self._progress, self._ahead, out=self._carried)
        return self._carried if self._carried.any() else None

    def add_way(self) -> None:
        """A step has ended."""
        self._progress += self.way

    def cut(self) -> bool:
        """Take the progress as a delta. False for one that is not finite: the node is at its base again."""
        self._add_to_base()
        if not is_finite(self._progress):
            self._progress[:] = 0.0
            return False
        self._delta[:] = self._progress
        self.is_exchanging = True
        return True

    def enter(self, step: int, keeps_base: Ranges, takes_back: Ranges, adds_delta: Ranges = ()) -> None:
        """See `Trainer.arrived`."""
        self._add_to_base()
        for first, end in takes_back:
            self._progress[first:end] += self._delta[first:end]
            self._ahead[first:end] -= self._delta[first:end]
        parts = [slice(*each) for each in keeps_base]
        kept = [(part, self._shared[part].copy(), self._ahead[part].copy()) for part in parts]
        self._shared[:] = self._vector
        self._ahead[:] = 0.0
        for part, values, ahead in kept:
            self._shared[part] = values
            self._ahead[part] = ahead
        for first, end in adds_delta:
            self._ahead[first:end] = self._delta[first:end]
        self.is_exchanging, self.known_step = False, step

    def _add_to_base(self) -> None:
        """What goes to the owners is no progress any more."""
        if self.is_encoded:
            self.is_encoded = False
            self._progress -= self._delta
            self._ahead += self._delta


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
