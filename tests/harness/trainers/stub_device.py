"""Trainers of one node without a model: they ask for each step, in virtual time, and stand on a line of real numbers.

Each value of a `StubDevice` moves by its `rate` in every local step, so positions and means are exact. Faults are those
of `StubTrainer`; `die` fails at once, wherever the trainer is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from p2pnode.training.devices.host import HostTrainer
from p2pnode.training.devices.node_step import DeviceGroups
from p2pnode.training.settings import DevicesSettings, TrainingSettings
from p2pnode.training.trainer_link.interface import MergeOrder, StepOrder, StepReport, TrainerFailed, Vector
from p2pnode.training.trainer_link.messages import StepAnswer
from tests.harness.environment.simulated import make_environment
from tests.harness.trainers.stub_trainer import StubTrainer

SIZE = 8


class StubDevice(StubTrainer):
    """Takes `pace_s` for a local step, in which each value moves by `rate`. `answers` has what it was told."""

    def __init__(self, index: int, *, rate: float = 1.0, pace_s: float = 1.0) -> None:
        super().__init__(f"device-{index}", SIZE, evaluates=True)
        self.rate, self.pace_s = rate, pace_s
        self.answers: list[StepAnswer] = []
        self.began: list[float] = []
        #: Local steps of each order that was reported.
        self.taken: list[int] = []
        self.merges: list[MergeOrder] = []
        #: All devices of the node, where a group of them works.
        self.fellows: Sequence[StubDevice] = ()
        self.recent_loss: float | None = None
        #: Set to fail with it at the next step.
        self.fails_with: TrainerFailed | None = None
        #: Whether `hang` holds it already before it asks for its first step.
        self.hangs_early = False
        #: Whether it hangs in its next merge.
        self.hangs_in_merge = False
        self._handler: Callable[[int], None] = lambda _: None
        self._answer: asyncio.Future[StepAnswer] | None = None
        self._death: asyncio.Future[TrainerFailed] | None = None

    def on_step(self, handler: Callable[[int], None]) -> None:
        self._handler = handler

    def answer_step(self, number: int, answer: StepAnswer) -> None:
        del number
        assert self._answer is not None
        assert not self._answer.done(), "two answers to one request"
        self._answer.set_result(answer)

    async def merge(self, order: MergeOrder) -> bool:
        """Its own delta is in place already; in a group of `fellows` the one that writes has their mean instead."""
        self._need_running()
        self.merges.append(order)
        if self.hangs_in_merge:
            self.hang()
        while self._hanging is not None:
            self._set_state("hung")
            await self._hanging.wait()
        self._set_state("running")
        await asyncio.sleep(0.01)
        if len(order.members) > 1 and not self.fellows:
            return False
        if len(order.members) > 1 and order.writes:
            deltas = [self.fellows[index].merges[-1].weight * self.fellows[index].delta for index in order.members]
            self.delta[:] = sum(deltas)
        return True

    def die(self, failure: TrainerFailed | None = None) -> None:
        """As if its process were killed now."""
        if self._death is not None and not self._death.done():
            self._death.set_result(failure or TrainerFailed("killed (stub)"))

    async def train(self, order: StepOrder) -> StepReport:
        self._need_running()
        self._death = asyncio.get_running_loop().create_future()
        work = asyncio.create_task(self._work(order))
        try:
            await asyncio.wait([work, self._death], return_when=asyncio.FIRST_COMPLETED)
            if self._death.done():
                self._set_state("crashed")
                raise self._death.result()
            return work.result()
        finally:
            work.cancel()

    async def _work(self, order: StepOrder) -> StepReport:
        self.orders.append(order)
        self.began.append(float(self.vector[0]) + (float(self.delta[0]) if order.at_delta else 0.0))
        while self.hangs_early and self._hanging is not None:
            self._set_state("hung")
            await self._hanging.wait()
        steps, loop = 0, asyncio.get_running_loop()
        while True:
            self._answer = loop.create_future()
            self._handler(steps + 1)
            answer = await self._answer
            self.answers.append(answer)
            if answer is StepAnswer.STOP:
                await loop.create_future()  # abandoned: there is no report
            if answer is StepAnswer.DISTRIBUTED:
                break
            await asyncio.sleep(self.pace_s)
            while self._hanging is not None:
                self._set_state("hung")
                await self._hanging.wait()
            self._set_state("running")
            if self.fails_with is not None:
                failure, self.fails_with = self.fails_with, None
                self._set_state("crashed")
                raise failure
            steps += 1
        self.delta[:] = self.rate * steps
        self.taken.append(steps)
        return StepReport(order.step, self.rate, 8 * steps, steps, self.pace_s * steps, {}, self.recent_loss)


def host_of(
    devices: Sequence[StubDevice],
    log: Any = None,
    groups: DeviceGroups | None = None,
    leaders: int = 2,
    **settings: Any,
) -> HostTrainer:
    """One trainer made of these; settings of `[devices]`, and `local_steps` of `[training]`.
    `leaders`: those whose values have memory."""
    vector: Vector = np.zeros(SIZE, np.float32)
    for device in devices:
        device.vector = vector
    of_training = {key: settings.pop(key) for key in ("local_steps",) if key in settings}
    memory = [np.zeros(SIZE, np.float32) for _ in range(leaders)]
    environment = make_environment(log=log) if log is not None else make_environment()
    return HostTrainer(
        [f"stub:{index}" for index in range(len(devices))],
        devices,
        lambda: memory,
        groups,
        DevicesSettings(**settings),
        TrainingSettings(**of_training),
        environment,
    )
