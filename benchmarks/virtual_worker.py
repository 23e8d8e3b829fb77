"""A node of the benchmarks with a virtual clock: real model and optimiser; its exchange takes a share of the next turn.

Values enter the model between two optimiser steps, and what a codec leaves out stays progress
(`training.trainer.model.value_entry`).
"""

from __future__ import annotations

import numpy as np

from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.encoding.table import CodecName
from p2pnode.training.trainer.runner import TaskRunner
from p2pnode.training.trainer_link.interface import StepOrder
from p2pnode.training.trainer_link.messages import DeltaEncoded, StepAnswer, ValuesArrived

#: Values enter so much of a turn after the cut …
LATE = 0.3
#: … and after this share of that time the delta is added at its owner, and the value is read there.
ADDED = 2 / 3


class VirtualWorker:
    """`value`: what all nodes begin with, `float32[total]`."""

    def __init__(self, runner: TaskRunner, value: Vector) -> None:
        self.step = 0
        #: The last delta; since it was encoded what is sent of it.
        self.delta = np.zeros_like(value)
        #: The value that enters in the next turn; None: no delta is exchanged.
        self.pulled: Vector | None = None
        self._runner = runner
        self._value = value.copy()
        runner.use(self._value, self.delta)
        runner.begin_anew()

    def train(self, workers: int, local_steps: int, before: int = 0) -> None:
        """One turn, and the cut. What was pulled enters after `before` optimiser steps."""
        self.step += 1
        if not before:
            self._enter()
        order = StepOrder(self.step, local_steps, workers, is_first=False)
        report = self._runner.train(order, link=_Arrival(self, before))
        assert report is not None
        assert report.has_delta

    def encode(self, codec: CodecName) -> None:
        """Make the delta what its owner gets of it."""
        if codec != "float32":
            rest = np.zeros_like(self.delta)
            codecs.encode_with_feedback(self.delta, rest, codec)
            self.delta -= rest
        self._runner.apply(DeltaEncoded())

    def arrival(self) -> ValuesArrived | None:
        """What was pulled, in the runner's buffer."""
        pulled, self.pulled = self.pulled, None
        if pulled is None:
            return None
        self._value[:] = pulled
        return ValuesArrived(self.step)

    def _enter(self) -> None:
        if (news := self.arrival()) is not None:
            self._runner.apply(news)


class _Arrival:
    """Implements `training.trainer.runner.TurnLink`: it is looked at after each optimiser step."""

    def __init__(self, worker: VirtualWorker, before: int) -> None:
        self._worker, self._left = worker, before

    def next_step(self) -> StepAnswer:
        return StepAnswer.LOCAL

    def news(self) -> ValuesArrived | None:
        self._left -= 1
        return None if self._left else self._worker.arrival()

    def entered(self) -> None:
        pass


def initial(runner: TaskRunner) -> Vector:
    """The model as its task builds it, `float32[total]`."""
    vector = np.zeros(runner.model_vector.layout.total, np.float32)
    runner.model_vector.read(vector)
    return vector


def metrics_of(runner: TaskRunner, value: Vector) -> dict[str, float]:
    """Of any vector, by a runner that trains nothing or begins anew."""
    runner.use(value, np.zeros_like(value))
    runner.begin_anew()
    evaluation = runner.evaluate(0)
    assert evaluation is not None
    return evaluation.metrics
