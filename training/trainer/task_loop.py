"""The training loop of a task class: a script on `AttachedSwarm`, whose model the daemon may have evaluated.

An optimiser step takes `accumulate` batches; one that the scaler skips counts for nothing. Batches are the task's own,
or those of `[dispatch]` where records are set: its `decode(record)` makes a sample of the bytes of a record, or its
`from_example(example)` of the named values that `p2pnode records pack` wrote. Its `collate(samples)`, or torch's
default, makes a batch. `batch_size` is the task's, or that of `[training.options]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from p2pnode.training.dispatch.recordio import decode_example
from p2pnode.training.tasks.task import Task, TaskError, TrainSpec
from p2pnode.training.trainer.attached_swarm import AttachedSwarm
from p2pnode.training.trainer.connection import DaemonConnection, ScriptWarnings
from p2pnode.training.trainer.joining import join
from p2pnode.training.trainer.loading import user_code_errors
from p2pnode.training.trainer.ranks import Ranks
from p2pnode.training.trainer.records.record_draws import Decode
from p2pnode.training.trainer.script_arguments import ScriptArguments, require_model
from p2pnode.training.trainer.state import snapshot
from p2pnode.training.trainer.turns import Turns
from p2pnode.training.trainer_link.interface import Evaluation, TrainerFailed
from p2pnode.training.trainer_link.messages import Start

#: A scaler that starts at 2^16 and halves needs at most sixteen skipped steps; more mean that it finds no scale.
MAX_SKIPPED = 50

BATCH_SIZE = 32


class _Interrupted(BaseException):
    """Not an `Exception`, so that a user's `except Exception` does not catch it."""


class TaskLoop:
    """A task and its node. With records the task's own `batches` are not asked for."""

    def __init__(
        self,
        name: str,
        task: Task,
        spec: TrainSpec,
        connection: DaemonConnection,
        records_options: Mapping[str, Any] | None = None,
    ) -> None:
        """`records_options`: `[training.options]` of a task that is to train on records. Raises `TrainerFailed`."""
        self._name = name
        self._task = task
        self._spec = spec
        self._connection = connection
        warnings = ScriptWarnings()
        require_model(spec.model)
        self.given = ScriptArguments.of(
            spec.optimizer, spec.scheduler, spec.scaler, warnings, {"data": self}, spec.on_load
        )
        self.turns = Turns(
            spec.model,
            self.given,
            Ranks(),
            connection,
            warnings,
            include_frozen=spec.include_frozen,
            task=name,
            version=str(getattr(task, "version", "")),
            evaluate=self.evaluate,
        )
        self._swarm = AttachedSwarm(self.turns)
        self._skipped = 0
        self._begin_batches: Callable[[], Iterator[Any]] = lambda: iter(task.batches())
        self._decode: Decode | None = None
        self._batches: Iterator[Any] = iter(())
        if records_options is not None:
            own_size = getattr(task, "batch_size", None)
            self._batch_size = int(own_size if own_size is not None else records_options.get("batch_size", BATCH_SIZE))
            self._collate: Callable[[list[Any]], Any] = getattr(task, "collate", default_collate)
            with user_code_errors(name, "decode()"):
                self._decode = _decoder(task)
        else:
            with user_code_errors(name, "batches()"):
                self._batches = self._begin_batches()

    def join(self, start: Start) -> None:
        """Describe the model to the daemon, whose first message `start` is, and begin the first turn. Raises as
        `training.trainer.joining.join` does."""
        join(self.turns, start)
        self.open_records()
        self.turns.take_order()

    def open_records(self) -> None:
        """Take the batches from the records of `[dispatch]`, if there are any. Raises `TrainerFailed`."""
        if self._decode is None:
            return
        try:
            records = self._swarm.records(self._decode)
        except ValueError as error:
            raise TrainerFailed(str(error), "see [dispatch]", fatal=True) from error

        def batches() -> Iterator[list[Any]]:
            samples = iter(records)
            while batch := list(islice(samples, self._batch_size)):
                yield batch

        self._begin_batches = batches

    def run(self) -> None:
        """Train until the node ends. Raises `TrainerFailed`, and as `AttachedSwarm.step` does."""
        while not self._swarm.done:
            self.step()

    def step(self) -> None:
        """One optimiser step. Nothing where no record can be had: a turn was reported, or the node ends."""
        for optimizer in self.given.optimizers:
            optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        samples = 0
        while len(losses) < self._spec.accumulate and (found := self._next_batch(begins=not losses)) is not None:
            batch, size = found
            losses.append(self._backward(batch))
            samples += size
            self._swarm.alive()
        if not losses:
            return
        if len(losses) < self._spec.accumulate:  # the mean of fewer losses
            self._scale_gradients(self._spec.accumulate / len(losses))
        self._apply_gradients()
        self._swarm.step(samples=samples, loss=losses[0] if len(losses) == 1 else torch.stack(losses).mean())

    def _backward(self, batch: Any) -> Tensor:
        scaler, accumulate = self.given.scaler, self._spec.accumulate
        with user_code_errors(self._name, "loss()", fatal=False):
            loss = self._task.loss(self._spec.model, batch)
            _check_loss(loss)
            part = loss / accumulate if accumulate > 1 else loss
            (scaler.scale(part) if scaler is not None else part).backward()  # type: ignore[no-untyped-call]
        return loss.detach().reshape(())

    def _scale_gradients(self, factor: float) -> None:
        for parameter in self._spec.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _apply_gradients(self) -> None:
        """Take the optimiser step, and move the schedules on, unless the scaler skips it because gradients are not
        finite."""
        spec, scaler = self._spec, self.given.scaler
        if scaler is not None:
            for optimizer in self.given.optimizers:
                scaler.unscale_(optimizer)
        if spec.clip_norm:
            nn.utils.clip_grad_norm_(spec.model.parameters(), spec.clip_norm)
        scale = scaler.get_scale() if scaler is not None else 0.0
        for optimizer in self.given.optimizers:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
            if scaler.get_scale() < scale:
                self._skipped += 1
                if self._skipped > MAX_SKIPPED:
                    raise TrainerFailed(
                        f"the scaler of the task {self._name} has skipped {self._skipped} optimiser steps in a row",
                        "its gradients are not finite at any scale: lower the learning rate, or see its loss()",
                    )
                return
        self._skipped = 0
        self.given.advance()

    # --- data ---------------------------------------------------------------------------------------------------

    def _next_batch(self, *, begins: bool) -> tuple[Any, int] | None:
        """The next batch and its samples. None where records have ended for now: `begins` says whether to wait for
        more, and to report before."""
        has_records = self._decode is not None
        with user_code_errors(self._name, "decode()" if has_records else "batches()", fatal=False):
            for batch in self._batches:
                return self._counted(batch)
            if has_records and not begins:
                return None
            self._batches = self._begin_batches()
            for batch in self._batches:
                return self._counted(batch)
        if has_records:
            return None
        raise TrainerFailed(f"batches() of the task {self._name} yields nothing", "see its data", fatal=True)

    def _counted(self, batch: Any) -> tuple[Any, int]:
        if self._decode is not None:
            return self._collate(batch), len(batch)
        own = getattr(self._task, "samples", None)
        return batch, int(own(batch)) if own is not None else _leading_dimension(batch)

    def state_dict(self) -> dict[str, Any]:
        """The position of the task's own data, if it has one; that of records is the node's."""
        for holder in (self._batches, self._task):
            if hasattr(holder, "state_dict"):
                state: dict[str, Any] = holder.state_dict()
                return state
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position. Raises as the task does."""
        if not state:
            return
        for holder in (self._batches, self._task):
            if hasattr(holder, "load_state_dict"):
                holder.load_state_dict(state)
                if holder is self._task:
                    self._batches = self._begin_batches()
                return

    # --- evaluation ---------------------------------------------------------------------------------------------

    def evaluate(self, step: int) -> Evaluation | None:
        """Metrics of the model as it is; None when interrupted. The modules' modes and the generators' states are as
        before."""
        model = self._spec.model
        modes = [(module, module.training) for module in model.modules()]
        generators = snapshot.random_state()

        def after_pass(*_: Any) -> None:
            # Every forward pass is a sign of life, so that a long evaluation does not count as a hang.
            self._swarm.alive()
            if self._connection.interrupted():
                raise _Interrupted

        hook = model.register_forward_hook(after_pass)
        try:
            model.eval()
            with torch.no_grad(), user_code_errors(self._name, "evaluate()", fatal=False):
                metrics, samples = self._task.evaluate(model)
                return Evaluation(step, {key: float(value) for key, value in metrics.items()}, int(samples))
        except _Interrupted:
            return None
        finally:
            hook.remove()
            snapshot.restore_random_state(generators)
            for module, training in modes:
                module.training = training


def _decoder(task: Any) -> Decode:
    decode: Decode | None = getattr(task, "decode", None)
    if decode is not None:
        return decode
    from_example: Callable[[Any], Any] | None = getattr(task, "from_example", None)
    if from_example is not None:
        return lambda record: from_example(decode_example(record))
    raise TaskError(
        f"dispatch.records is set, and the task {type(task).__name__} has neither decode(record) nor "
        "from_example(example)",
        "add decode(self, record: bytes) to it, which returns a sample, or from_example(self, example: dict) for files "
        "of `p2pnode records pack`; or leave dispatch.records empty, so that its own batches() is used",
    )


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
