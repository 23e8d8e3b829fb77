"""Runs a task's loop by calls instead of a daemon's messages, in this process: a turn, an exchange, an evaluation.

For `training.trainer.standalone`, benchmarks and tests: the loop and all that happens to the model are those of a node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from p2pnode.training.tasks.task import Task, TrainSpec
from p2pnode.training.trainer.connection import DaemonConnection, Warn
from p2pnode.training.trainer.model.value_entry import News
from p2pnode.training.trainer.state import snapshot
from p2pnode.training.trainer.task_loop import TaskLoop
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.interface import Evaluation, ModelDescription, StepOrder, StepReport, Vector
from p2pnode.training.trainer_link.messages import StepAnswer


def never() -> bool:
    return False


class TurnLink(Protocol):
    """What a daemon says to a trainer during a turn."""

    def next_step(self) -> StepAnswer:
        """What the next iteration of a turn that asks is."""
        ...

    def news(self) -> News | None:
        """What it has said of the last delta; asked after each optimiser step."""
        ...

    def entered(self) -> None:
        """The model has moved to the values that arrived."""
        ...


class _TurnEnded(BaseException):
    """The loop asks for its next order, and there is none: the caller has the processor again."""


class _Calls(DaemonConnection):
    """A connection without a socket: it answers from the arguments of the present call."""

    def __init__(self, progress: Callable[[], None], warn: Warn) -> None:
        self.stopping = self.lost = False
        self.known = None
        self.order: messages.Train | None = None
        self.report: StepReport | None = None
        self.link: TurnLink | None = None
        self.is_interrupted = never
        self._progress = progress
        self._warn = warn

    def send(self, message: messages.FromTrainer) -> None:
        match message:
            case messages.Trained(_, report):
                self.report = report
            case messages.ValuesEntered() if self.link is not None:
                self.link.entered()
            case messages.Warned(event, what, do):
                self._warn(event, what, do)

    def progress(self) -> None:
        self._progress()

    def interrupted(self) -> bool:
        return self.is_interrupted()

    def receive(self, timeout_s: float | None = None) -> messages.FromDaemon | None:  # noqa: ARG002
        order, self.order = self.order, None
        if order is None:
            raise _TurnEnded
        return order

    def news(self) -> News | None:
        return None if self.link is None else self.link.news()

    def next_step(self) -> StepAnswer:
        return StepAnswer.LOCAL if self.link is None else self.link.next_step()


class TaskRunner:
    """A task and its model. `progress` is called after each optimiser step, `warn` with an event and a text."""

    def __init__(
        self,
        name: str,
        task: Task,
        spec: TrainSpec,
        *,
        progress: Callable[[], None] = lambda: None,
        warn: Warn = lambda _event, _message, _do="": None,
        records_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._calls = _Calls(progress, warn)
        self._loop = TaskLoop(name, task, spec, self._calls, records_options)
        self._turns = self._loop.turns
        self.task = task
        self.model_vector = self._turns.model_vector
        self.loads = self._turns.loads
        self.given = self._loop.given

    @property
    def samples_seen(self) -> int:
        return self._turns.samples_seen

    def use(self, vector: Vector, delta: Vector) -> None:
        """The buffers that a daemon would share, both `float32[total]`."""
        self._turns.entry.use(vector, delta)

    def follow(self, leaders: tuple[Vector, ...]) -> None:
        """The values to which turns may pull the model (`training.trainer.device_turns`)."""
        self._turns.devices.follow(leaders)

    def begin_anew(self) -> None:
        """The next turn, or evaluation, loads the vector: what was trained since the last delta is gone."""
        self._turns.begin_anew()

    def apply(self, news: News, link: TurnLink | None = None) -> None:
        """Apply what a daemon would say of the last delta."""
        self._calls.link = link
        self._turns.apply(news)

    def train(
        self, order: StepOrder, interrupted: Callable[[], bool] = never, link: TurnLink | None = None
    ) -> StepReport | None:
        """One turn; None when interrupted. Values that `link` brings enter between two optimiser steps."""
        calls = self._calls
        calls.order, calls.report = messages.Train(1, order), None
        calls.is_interrupted, calls.link = interrupted, link
        try:
            self._turns.take_order()
            while True:
                self._loop.step()
        except _TurnEnded:
            return calls.report

    def evaluate(self, step: int, interrupted: Callable[[], bool] = never) -> Evaluation | None:
        """Metrics of the shared values that this trainer knows; None when interrupted."""
        self._calls.is_interrupted = interrupted
        return self._turns.evaluation(step)

    def state(self) -> dict[str, Any]:
        """What is to be saved, inside `WeightLoads.saving`."""
        return self._turns.script_state.content(self.samples_seen, self._turns.order.local_steps)

    def restore(self, path: Path) -> None:
        """Restore what was saved. Raises `TrainerFailed`."""
        self._turns.restore(snapshot.load(path), path)

    def describe(self, folder: str, *, wait: bool) -> ModelDescription:
        """See `Trainer.describe`. Raises `CannotWrite`."""
        return self._turns.describer.describe(folder, wait=wait)
