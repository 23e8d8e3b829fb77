"""A trainer with a real task and real torch, run inline: for proofs by equality on the simulated network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import torch

from p2pnode.training.tasks.task import Task
from p2pnode.training.trainer.runner import TaskRunner
from p2pnode.training.trainer_link.data_messages import DataFromDaemon, DataFromTrainer
from p2pnode.training.trainer_link.engine_messages import EngineSaid
from p2pnode.training.trainer_link.interface import (
    BusyWith,
    Evaluation,
    ModelDescription,
    Ranges,
    Resume,
    StepOrder,
    StepReport,
    TrainerEnd,
    TrainerFailed,
    TrainerHello,
    Vector,
)
from p2pnode.training.trainer_link.messages import DeltaEncoded, ValuesArrived

#: Virtual seconds of a step.
STEP_S = 0.1


class InlineTrainer:
    """Implements `training.trainer_link.interface.Trainer` around a `TaskRunner`; one thread, on the loop."""

    def __init__(self, task: Task, seed: int) -> None:
        torch.manual_seed(seed)
        self.runner = TaskRunner("inline", task, task.build())
        size = self.runner.model_vector.layout.total
        self.vector: Vector = np.zeros(size, np.float32)
        self.delta: Vector = np.zeros(size, np.float32)
        self.runner.use(self.vector, self.delta)
        self.orders: list[StepOrder] = []
        self.rates: list[float] = []
        self.on_state: Callable[[str], None] | None = None
        self.state = "stopped"
        self.is_script = False
        self.busy: BusyWith | None = None
        self.findings: list[tuple[str, str]] = []

    async def start(self, restore: str = "", *, resume: Resume | None = None) -> TrainerHello:
        await asyncio.sleep(STEP_S)
        if self.state == "stopped":
            self.runner.model_vector.read(self.vector)
        self.state = "running"
        vector = self.runner.model_vector
        return TrainerHello(vector.layout, "inline", "1", vector.frozen_digest, "cpu", 0)

    async def train(self, order: StepOrder) -> StepReport:
        self.orders.append(order)
        await asyncio.sleep(STEP_S)
        report = self.runner.train(order)
        assert report is not None
        self.rates.append(report.metrics["learning_rate"])
        return report

    def encoded(self) -> None:
        self.runner.apply(DeltaEncoded())

    async def arrived(
        self, step: int, keeps_base: Ranges = (), takes_back: Ranges = (), adds_delta: Ranges = ()
    ) -> None:
        self.runner.apply(ValuesArrived(step, list(keeps_base), list(takes_back), list(adds_delta)))

    async def evaluate(self, step: int) -> Evaluation | None:
        return self.runner.evaluate(step)

    async def save(self, path: str) -> Awaitable[None]:
        """Nothing: these swarms keep no checkpoints."""
        raise NotImplementedError(path)

    async def describe(self, folder: str, *, wait: bool = False) -> ModelDescription:
        return self.runner.describe(folder, wait=wait)

    def take_measured(self) -> list[Evaluation]:
        return []

    def on_data(self, handler: Callable[[DataFromTrainer], None]) -> None:
        """It shares no data."""

    def send_data(self, message: DataFromDaemon) -> None:
        """It shares no data."""

    def on_engine(self, handler: Callable[[EngineSaid], None]) -> None:
        """It uses no engine."""

    async def ended(self) -> TrainerFailed:
        """It ends when it is told to."""
        return await asyncio.get_running_loop().create_future()

    async def finish(self, reason: str, finish_s: float) -> TrainerEnd:
        return await self.stop()

    async def stop(self, stop_s: float = 0.0) -> TrainerEnd:
        self.state = "stopped"
        return TrainerEnd()
