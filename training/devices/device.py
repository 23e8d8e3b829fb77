"""One trainer of several: its state, what it has done, and its restarts, which stop none of the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from p2pnode.overlay.environment import Environment
from p2pnode.training.failures import Failures
from p2pnode.training.trainer_link.interface import (
    MergeOrder,
    StepOrder,
    StepReport,
    Trainer,
    TrainerFailed,
    TrainerLeft,
)
from p2pnode.training.trainer_link.messages import StepAnswer


class DeviceTrainer(Trainer, Protocol):
    """A trainer that asks before each optimiser step (`StepOrder.asks`). `on_state` is called with every new state."""

    on_state: Callable[[str], None] | None

    def on_step(self, handler: Callable[[int], None]) -> None:
        """Call `handler` with the number of each request for a step; replaces the previous handler."""
        ...

    def answer_step(self, number: int, answer: StepAnswer) -> None:
        """Answer the request of this number of the present order."""
        ...

    async def merge(self, order: MergeOrder) -> bool:
        """Merge the delta that the last order kept; False if the group has failed. Raises `TrainerFailed`."""
        ...


@dataclass(slots=True, eq=False)
class Device:
    """Trainer number `index` of a node. `start` starts its process anew, from its own saved state. `on_gone` is called
    when it is given up."""

    index: int
    name: str
    trainer: DeviceTrainer
    environment: Environment
    counted: Failures
    start: Callable[[int], Awaitable[None]]
    on_gone: Callable[[int], None]
    failures: int = 0
    optimizer_steps: int = 0
    samples: int = 0
    last: StepReport | None = None
    pid: int | None = None
    #: The others of the node follow it.
    leads: bool = False
    #: It is given up: `TrainerLeft` if its script has ended.
    gone: TrainerFailed | None = None
    #: The order under way, also one whose cycle has gone on without it.
    task: asyncio.Task[StepReport] | None = None
    #: Requests for a step so far, over all orders.
    asked: int = 0
    _number: int = 0
    _restarting: asyncio.Task[None] | None = None

    @property
    def state(self) -> str:
        """That of its trainer, or `failed` if it is given up."""
        if self.gone is not None:
            return "left" if isinstance(self.gone, TrainerLeft) else "failed"
        return self.trainer.state

    @property
    def is_free(self) -> bool:
        """Whether it takes an order now."""
        return self.gone is None and self.task is None and self._restarting is None

    # -- orders --------------------------------------------------------------------------------------------------

    def begin(self, order: StepOrder) -> None:
        """Give it an order; `task` has the report."""
        self.task = asyncio.create_task(self.trainer.train(order), name=f"device-{self.index}")

    def note_request(self, number: int) -> int:
        """It has asked for a step; its number over all orders."""
        self._number = number
        self.asked += 1
        return self.asked

    def answer(self, answer: StepAnswer) -> None:
        """Answer its last request."""
        self.trainer.answer_step(self._number, answer)

    def take_report(self) -> StepReport:
        """What its order has come to. Raises `TrainerFailed`."""
        assert self.task is not None
        task, self.task = self.task, None
        report = task.result()
        self.counted.completed_step()
        self.last = report
        self.samples += report.samples
        self.optimizer_steps += report.optimizer_steps
        return report

    async def cancel(self) -> None:
        """Abandon its order and its restart, where there is one."""
        tasks = [task for task in (self.task, self._restarting) if task is not None]
        self.task = self._restarting = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- failures ------------------------------------------------------------------------------------------------

    def note_failure(self, failure: TrainerFailed) -> None:
        """It has failed: restart it beside the others, unless that would fail in the same way again."""
        pause_s = self._pause_s(failure)
        if pause_s is not None:
            self.environment.log.warning("device_dropped", device=self.name, index=self.index, reason=failure.reason)
            self._restarting = asyncio.create_task(self._restart(failure, pause_s), name=f"restart-device-{self.index}")

    def _pause_s(self, failure: TrainerFailed) -> float | None:
        """How long to wait before the next start; None if it is given up."""
        self.failures += 1
        log, place = self.environment.log, {"device": self.name, "index": self.index}
        count = self.counted.note(failure.cause, self.environment.clock.monotonic())
        try:
            return self.counted.pause_s(failure, count)
        except TrainerFailed as last:
            self.gone = last
        if isinstance(failure, TrainerLeft):
            log.info("device_left", **place, reason=failure.reason)
        else:
            log.error("device_given_up", **place, reason=self.gone.reason, hint=self.gone.hint)
        self.on_gone(self.index)
        return None

    async def _restart(self, failure: TrainerFailed, pause_s: float | None) -> None:
        try:
            while pause_s is not None:
                await asyncio.sleep(pause_s)
                try:
                    await self.start(self.index)
                except TrainerFailed as again:
                    pause_s = self._pause_s(again)
                else:
                    self.environment.log.info(
                        "device_restarted", device=self.name, index=self.index, after=failure.reason
                    )
                    return
        finally:
            if self._restarting is asyncio.current_task():
                self._restarting = None
