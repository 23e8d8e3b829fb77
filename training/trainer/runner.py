"""The training loop of a task: executes one order at a time.

`local_steps` counts optimiser steps: accumulated batches make one, and a step that the scaler skips is none. The runner
is independent of the daemon; it also trains alone (`training.trainer.standalone`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from p2pnode.training.tasks.task import Task, TrainSpec
from p2pnode.training.trainer import snapshot
from p2pnode.training.trainer.contract import ModelContract
from p2pnode.training.trainer.device_merge import DeviceMerge
from p2pnode.training.trainer.leaders import LeaderPulls
from p2pnode.training.trainer.loading import user_code_errors
from p2pnode.training.trainer.model_description import ModelDescriber
from p2pnode.training.trainer.recent_losses import RecentLosses
from p2pnode.training.trainer.records.batches import RecordBatches
from p2pnode.training.trainer.rounding import roundings
from p2pnode.training.trainer.schedule import Warn
from p2pnode.training.trainer.script_arguments import ScriptArguments, require_model
from p2pnode.training.trainer.value_entry import News, ValueEntry
from p2pnode.training.trainer.vector import ModelVector
from p2pnode.training.trainer.weight_loads import WeightLoads
from p2pnode.training.trainer_link.interface import (
    Evaluation,
    ModelDescription,
    StepOrder,
    StepReport,
    TrainerFailed,
    Vector,
)
from p2pnode.training.trainer_link.messages import ValuesArrived
from p2pnode.training.trainer_link.step_messages import StepAnswer

#: A scaler that starts at 2^16 and halves needs at most sixteen skipped steps; more mean that it finds no scale.
MAX_SKIPPED = 50


def never() -> bool:
    return False


class TurnLink(Protocol):
    """What the daemon says to a trainer during a turn."""

    def next_step(self) -> StepAnswer:
        """What the next iteration of a turn that asks is."""
        ...

    def news(self) -> News | None:
        """What it has said of the last delta."""
        ...

    def entered(self) -> None:
        """The model has moved to the values that arrived."""
        ...


class _Alone:
    """The link of a trainer that nobody talks to."""

    def next_step(self) -> StepAnswer:
        return StepAnswer.LOCAL

    def news(self) -> None:
        return None

    def entered(self) -> None:
        pass


ALONE: TurnLink = _Alone()


class _Interrupted(BaseException):
    """Not an `Exception`, so that a user's `except Exception` does not catch it."""


class TaskRunner:
    """A task and its model. `progress` is called with the optimiser steps done, `warn` with an event and a text."""

    def __init__(
        self,
        name: str,
        task: Task,
        spec: TrainSpec,
        *,
        records: RecordBatches | None = None,
        progress: Callable[[int], None] = lambda _: None,
        warn: Warn = lambda _event, _message, _do="": None,
    ) -> None:
        """With `records` these are trained, and the task's own `batches` are not asked for."""
        self.task = task
        self.spec = spec
        require_model(spec.model)
        self.given = ScriptArguments.of(spec.optimizer, spec.scheduler, spec.scaler, warn, on_load=spec.on_load)
        self.model_vector = ModelVector(spec.model, include_frozen=spec.include_frozen)
        has_own_copies = spec.on_load is not None
        self._contract = ModelContract(
            spec.model, self.model_vector, self.given.optimizers, warn, own_copies=has_own_copies
        )
        self.loads = WeightLoads(self.model_vector, self.given.optimizers, spec.on_load)
        self.merge = DeviceMerge(self.model_vector)
        self.entry = ValueEntry(self.model_vector)
        self._vector: Vector = np.zeros(0, np.float32)
        self._delta: Vector = np.zeros(0, np.float32)
        self._has_loaded = False
        #: One of several trainers of a node loads what each turn begins with.
        self._asks = False
        self._describer = ModelDescriber(spec.model, self.model_vector, warn)
        self.samples_seen = 0
        self._name = name
        self._progress = progress
        self._warn = warn
        for text in roundings(self.model_vector.named_tensors()):
            self._warn("values_rounded", text)
        self.records = records
        self._leaders = LeaderPulls(self.model_vector, ())
        self._losses = RecentLosses()
        self._batches: Iterator[Any] = iter(())
        if records is None:
            with user_code_errors(name, "batches()"):
                self._batches = iter(task.batches())

    def follow(self, leaders: tuple[Vector, ...]) -> None:
        """The values to which turns may pull the model (`training.trainer.leaders`)."""
        self._leaders = LeaderPulls(self.model_vector, leaders)
        self.merge.follow(leaders)

    # --- training -----------------------------------------------------------------------------------------------

    def use(self, vector: Vector, delta: Vector) -> None:
        """The buffers that are shared with the daemon, both `float32[total]`."""
        self._vector, self._delta = vector, delta
        self.entry.use(vector, delta)

    def begin_anew(self) -> None:
        """The next turn, or evaluation, loads the vector: what was trained since the last delta is gone."""
        self._has_loaded = self.entry.is_exchanging = self.entry.has_rest = False

    def apply(self, news: News, link: TurnLink = ALONE) -> None:
        """Apply what the daemon has said of the last delta."""
        self.entry.apply(news, self.loads)
        if isinstance(news, ValuesArrived):
            link.entered()

    def _apply_news(self, link: TurnLink) -> None:
        while (news := link.news()) is not None:
            self.apply(news, link)

    def _begin(self, order: StepOrder) -> None:
        """Load what the first turn begins with, and each turn of one of several trainers; others go on."""
        self._asks = order.asks
        if self._has_loaded and not order.asks:
            return
        with self.loads.load():
            self.merge.load(order, self._vector, self._delta)
        if not self._has_loaded:
            self._has_loaded, self.entry.known_step = True, order.step - 1

    def train(
        self, order: StepOrder, interrupted: Callable[[], bool] = never, link: TurnLink = ALONE
    ) -> StepReport | None:
        """Take the optimiser steps of a turn, and write the delta if the exchange of the last one has ended. None when
        interrupted. Values that `link` brings enter between two optimiser steps."""
        began_s = time.perf_counter()
        self._begin(order)
        if order.local_steps:
            position = (order.step - 1) * order.local_steps + order.done
            self.given.seek(position)
            self.loads.seek(position)
        self._leaders.begin(order, self.merge.leader)
        tally = _Tally()
        while (answer := _next(order, tally, link)) is not StepAnswer.DISTRIBUTED:
            if answer is StepAnswer.STOP or interrupted():
                return None
            if self.records is not None and not self._await_records(self.records, tally, interrupted, link):
                if interrupted() and not tally.batches:
                    return None
                break  # reported now, or what it waits for may wait for that report
            self._optimizer_step(tally, order.workers)
            self._apply_news(link)
            self._progress(tally.steps)
        self._contract.check()
        self.loads.check()
        is_finite, has_delta = self._cut(order)
        self.samples_seen += tally.samples
        loss, bad = tally.loss()
        self._losses.add(tally.losses, order.loss_window)
        metrics = {"learning_rate": float(self.given.optimizers[0].param_groups[0]["lr"])}
        if bad:
            self._warn("loss_not_finite", f"{bad} of {tally.batches} losses of step {order.step} are not finite")
            metrics["losses_not_finite"] = float(bad)
        if tally.skipped:
            metrics["scaler_skipped"] = float(tally.skipped)
        seconds = time.perf_counter() - began_s
        recent = self._losses.mean()
        return StepReport(order.step, loss, tally.samples, tally.steps, seconds, metrics, recent, is_finite, has_delta)

    def _cut(self, order: StepOrder) -> tuple[bool, bool]:
        """Take the delta, unless the exchange of the last one has not ended. Returns whether it is finite, and whether
        there is one."""
        if order.asks:
            return self.merge.report(order, self._delta), True
        return self.entry.cut(self.loads)

    def _await_records(
        self, records: RecordBatches, tally: _Tally, interrupted: Callable[[], bool], link: TurnLink
    ) -> bool:
        """Have a batch ready. False: there is something to report, and no batch can be had now; or the order was
        interrupted."""
        while True:
            has_rest = self.entry.has_rest
            if self._has_records(records, wait=not (tally.batches or has_rest), interrupted=interrupted):
                return True
            if tally.batches or not has_rest or interrupted():
                return False
            self._apply_news(link)
            if not self.entry.is_exchanging:
                return False
            records.idle()

    def _has_records(self, records: RecordBatches, *, wait: bool, interrupted: Callable[[], bool]) -> bool:
        with user_code_errors(self._name, "decode()", fatal=False):
            return records.prepare(wait=wait, interrupted=interrupted)

    def _optimizer_step(self, tally: _Tally, workers: float) -> None:
        spec, scaler = self.spec, self.given.scaler
        for optimizer in self.given.optimizers:
            optimizer.zero_grad(set_to_none=True)
        for index in range(spec.accumulate):
            if (
                index
                and self.records is not None
                and not self._has_records(self.records, wait=False, interrupted=never)
            ):
                self._scale_gradients(spec.accumulate / index)  # the mean of fewer losses
                break
            batch = self._next_batch()
            with user_code_errors(self._name, "loss()", fatal=False):
                loss = self.task.loss(spec.model, batch)
                _check_loss(loss)
                part = loss / spec.accumulate if spec.accumulate > 1 else loss
                (scaler.scale(part) if scaler is not None else part).backward()  # type: ignore[no-untyped-call]
            tally.add(loss.detach(), self._samples(batch))
            if index + 1 < spec.accumulate:
                self._progress(tally.steps)
        if self.records is not None:
            self.records.count()
        if self._apply_gradients():
            tally.steps += 1
            self.given.advance()
            self.loads.stepped(1, workers)
            with self.loads.pull() if self._leaders.moves else contextlib.nullcontext():
                self._leaders.apply()
        else:
            tally.skipped += 1

    def _scale_gradients(self, factor: float) -> None:
        for parameter in self.spec.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _apply_gradients(self) -> bool:
        """Take the optimiser step; False if the scaler skipped it because gradients were not finite."""
        spec, scaler = self.spec, self.given.scaler
        if scaler is not None:
            for optimizer in self.given.optimizers:
                scaler.unscale_(optimizer)
        if spec.clip_norm:
            nn.utils.clip_grad_norm_(spec.model.parameters(), spec.clip_norm)
        if scaler is None:
            for optimizer in self.given.optimizers:
                optimizer.step()
            return True
        before = scaler.get_scale()
        for optimizer in self.given.optimizers:
            scaler.step(optimizer)
        scaler.update()
        return not scaler.get_scale() < before

    def _next_batch(self) -> Any:
        if self.records is not None:
            with user_code_errors(self._name, "collate()", fatal=False):
                return self.records.take()
        with user_code_errors(self._name, "batches()", fatal=False):
            for _ in range(2):
                for batch in self._batches:
                    return batch
                self._batches = iter(self.task.batches())
        raise TrainerFailed(f"batches() of the task {self._name} yields nothing", "see its data", fatal=True)

    def _samples(self, batch: Any) -> int:
        own = getattr(self.task, "samples", None)
        return int(own(batch)) if own is not None else _leading_dimension(batch)

    # --- evaluation and files -----------------------------------------------------------------------------------

    def evaluate(self, step: int, interrupted: Callable[[], bool] = never) -> Evaluation | None:
        """Metrics of the shared values that this trainer knows; None when interrupted. The modules' modes, the
        generators' states and what the model held are restored."""
        if not self._has_loaded or self._asks:
            with self.loads.load():
                self.model_vector.load(self._vector)
        with self.loads.shared(lambda: True):
            return self._evaluate(step, interrupted)

    def _evaluate(self, step: int, interrupted: Callable[[], bool]) -> Evaluation | None:
        model = self.spec.model
        modes = [(module, module.training) for module in model.modules()]
        generators = snapshot.random_state()

        def after_pass(*_: Any) -> None:
            # Reports every forward pass, so that a long evaluation does not count as a hang.
            self._progress(0)
            if interrupted():
                raise _Interrupted

        hook = model.register_forward_hook(after_pass)
        try:
            model.eval()
            with torch.no_grad(), user_code_errors(self._name, "evaluate()", fatal=False):
                metrics, samples = self.task.evaluate(model)
                return Evaluation(step, {key: float(value) for key, value in metrics.items()}, int(samples))
        except _Interrupted:
            return None
        finally:
            hook.remove()
            snapshot.restore_random_state(generators)
            for module, training in modes:
                module.training = training

    def state(self) -> dict[str, Any]:
        """What is to be saved, inside `WeightLoads.saving`: optimiser, schedule, scaler, local buffers, data position.
        Its tensors are the live ones (`training.trainer.state_writer`)."""
        return {
            **self.given.state(),
            "loads": self.loads.state(),
            "local_buffers": self.model_vector.unshared.own(),
            "data": self._data_state(),
            "samples_seen": self.samples_seen,
        }

    def restore(self, path: Path) -> None:
        """Restore what was saved. Raises `TrainerFailed`."""
        state = snapshot.load(path)
        try:
            with self.loads.restoring(state["loads"]):
                self.given.restore(state)
            self.model_vector.unshared.restore(state["local_buffers"])
            self._restore_data(state["data"])
            self.samples_seen = int(state["samples_seen"])
            snapshot.restore_random_state(state["random"])
        except (KeyError, ValueError, RuntimeError) as error:
            raise TrainerFailed(
                f"the trainer's saved state {path} does not fit the task: {error}",
                "remove the file to continue with a fresh optimiser",
                fatal=True,
            ) from error

    def describe(self, folder: str, *, wait: bool) -> ModelDescription:
        """See `Trainer.describe`. Raises `CannotWrite`."""
        return self._describer.describe(folder, wait=wait, alive=lambda: self._progress(0))

    def _data_state(self) -> Any:
        for holder in (self.records or self._batches, self.task):
            if hasattr(holder, "state_dict"):
                return holder.state_dict()
        return None

    def _restore_data(self, state: Any) -> None:
        for holder in (self.records or self._batches, self.task):
            if state is not None and hasattr(holder, "load_state_dict"):
                holder.load_state_dict(state)
                if holder is self.task:
                    self._batches = iter(self.task.batches())
                return


class _Tally:
    """Sums over one order. Losses stay on the device until the end: reading one waits for the device."""

    def __init__(self) -> None:
        self.steps = 0
        self.skipped = 0
        self.batches = 0
        self.samples = 0
        self.losses: list[float] = []
        self._losses: list[Tensor] = []

    def add(self, loss: Tensor, samples: int) -> None:
        self.batches += 1
        self.samples += samples
        self._losses.append(loss)

    def loss(self) -> tuple[float, int]:
        """The mean loss, and how many were not finite."""
        if not self._losses:
            return math.nan, 0
        self.losses = losses = torch.stack([loss.reshape(()) for loss in self._losses]).tolist()
        return sum(losses) / len(losses), sum(not math.isfinite(loss) for loss in losses)


def _next(order: StepOrder, tally: _Tally, link: TurnLink) -> StepAnswer:
    """What the next iteration is; a trainer that does not ask ends its turn after `local_steps`."""
    if order.asks:
        return link.next_step()
    goes_on = tally.steps < order.local_steps and tally.skipped <= MAX_SKIPPED
    return StepAnswer.LOCAL if goes_on else StepAnswer.DISTRIBUTED


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(f"a scalar tensor is expected, and this is {what}")


def _leading_dimension(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor; 1 if it has none."""
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.dim() else 1
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    for part in parts:
        if isinstance(part, Tensor | dict | list | tuple):
            return _leading_dimension(part)
    return 1
