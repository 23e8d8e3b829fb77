"""`p2pnode.attach`: makes a user's own training loop a trainer of the swarm.

    swarm = p2pnode.attach(model, optimizer, scheduler)
    while not swarm.done:
        for batch in loader:
            ...                       # forward, backward, optimizer.step(), scheduler.step()
            swarm.step(samples=len(batch), loss=loss)
            if swarm.done:
                break

`attach` restores saved state, and returns when the model holds the swarm's weights. `swarm.step` counts optimiser
steps; after every `local_steps` of them it reports the delta and waits for the next turn. The script is started with
`p2pnode run -- python train.py`. Under torchrun every rank makes the same calls; only rank 0 is connected (`Ranks`).
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from training.errors import TrainingError
from training.trainer import snapshot
from training.trainer.connection import DaemonConnection, DaemonGone, StopAsked, end_with_daemon, report_failure
from training.trainer.export import export
from training.trainer.metric_means import MetricMeans
from training.trainer.ranks import Ranks, Turn
from training.trainer.schedule import Schedule
from training.trainer.snapshot import CannotWrite
from training.trainer.vector import ModelVector
from training.trainer_link import messages
from training.trainer_link.interface import StepReport, TrainerFailed, TrainerHello, Vector
from training.trainer_link.shared_memory import map_vectors

#: Rank 0 contacts waiting ranks this often, so that no collective times out during a long barrier.
RANKS_WAIT_S = 30.0

#: The task name of every script: the manifest compares layouts, not file names.
TASK = "attached"


class NotAttached(TrainingError, RuntimeError):
    """`attach` was called outside of a node, or the daemon refused the script."""


class SwarmLost(TrainingError, RuntimeError):
    """The daemon has ended; the model holds what this node trained last."""


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None = None,
    scaler: torch.amp.GradScaler | None = None,
    state: MutableMapping[str, Any] | None = None,
) -> AttachedSwarm:
    """Join the daemon that started this script; returns with the swarm's weights in `model`.

    `scheduler` counts optimiser steps and is moved to the swarm's position. `state` is saved and restored too: entries
    with `state_dict` and `load_state_dict` by these methods, others as plain values, replaced in the mapping. Raises
    `NotAttached`.
    """
    path = os.environ.get(messages.SOCKET_VARIABLE, "")
    if not path:
        raise NotAttached(
            "p2pnode.attach() was called outside of a node: start the script with "
            f"`p2pnode run -- python {Path(sys.argv[0]).name or 'train.py'}`"
        )
    try:
        ranks = Ranks.find()
        swarm = AttachedSwarm(model, optimizer, scheduler, scaler, state if state is not None else {}, ranks)
        swarm._open(path)  # noqa: SLF001 - the only place that constructs one
    except TrainerFailed as failure:
        raise NotAttached(f"{failure.reason}: {failure.hint}" if failure.hint else failure.reason) from failure
    return swarm


class AttachedSwarm:
    """The running node, for a training script. When `done` is true the model holds the shared weights: end the loop.

    `step_number` is the current step of the swarm, from 1; `samples_seen` counts the samples this node has trained on;
    `workers` is the number of nodes that train. `is_first` is true on one node of the swarm, for work to be done once.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        scaler: torch.amp.GradScaler | None,
        state: MutableMapping[str, Any],
        ranks: Ranks,
    ) -> None:
        self.done = False
        self.step_number = 0
        self.samples_seen = 0
        self.is_first = False
        self.workers = 1.0
        self._model = model
        self._optimizer = optimizer
        self._scaler = scaler
        self._state = state
        self._ranks = ranks
        self._warned: list[messages.Warned] = []
        self._connection: DaemonConnection | None = None
        self._vector: Vector = np.zeros(0, np.float32)
        self._delta: Vector = np.zeros(0, np.float32)
        self._scheduler = scheduler
        self._turn = 0
        self._turn_steps = 0
        self._local_steps = 0
        self._scale = scaler.get_scale() if scaler is not None else 0.0
        self._began_s = 0.0
        self._means = MetricMeans()
        self._samples = 0

    # --- called by the script -----------------------------------------------------------------------------------

    def step(self, samples: int = 0, loss: float | Tensor = math.nan, **metrics: float | Tensor) -> None:
        """Call after each optimiser step, with the number of `samples` on this rank and their mean `loss`.

        Every `local_steps` calls it reports the delta, and returns with the next weights loaded or `done` set. A step
        that the scaler skipped does not count. Raises `SwarmLost`.
        """
        if self.done:
            return
        self._samples += int(samples)
        for name, value in {"loss": loss, **metrics}.items():
            self._means.add(name, value)
        if not self._skipped():
            self._turn_steps += 1
        try:
            if self._turn_steps < self._local_steps:
                self._report_progress()
            else:
                self._report_turn()
                self._next_turn()
        except DaemonGone as gone:
            self.done = True
            raise SwarmLost("the p2pnode daemon that started this script has ended") from gone

    # --- opening ------------------------------------------------------------------------------------------------

    def _open(self, path: str) -> None:
        try:
            if self._ranks.is_first:
                self._connect(path)
            self._model_vector = ModelVector(self._model)
            self._schedule = Schedule(self._optimizer, self._scheduler, self._warn)
            if self._connection is not None:
                self._greet(self._connection)
        except TrainerFailed as failure:
            if self._connection is not None:
                report_failure(self._connection, failure)
            raise
        except (DaemonGone, StopAsked) as gone:
            raise NotAttached("the p2pnode daemon has ended while the script was starting") from gone
        try:
            self._next_turn()
        except DaemonGone as gone:
            raise NotAttached("the p2pnode daemon has ended while the script was starting") from gone

    def _connect(self, path: str) -> None:
        try:
            self._connection = DaemonConnection.connect(path)
        except OSError as error:
            raise NotAttached(
                f"no p2pnode daemon listens at {path} ({error.strerror}): it has ended, or another process of this "
                "script has attached already; under torchrun call torch.distributed.init_process_group() first"
            ) from error
        end_with_daemon(signal.SIGTERM)

    def _greet(self, connection: DaemonConnection) -> None:
        start = connection.receive_start()
        if start.threads:
            torch.set_num_threads(start.threads)
        if start.restore:
            self._restore(Path(start.restore))
        vector = self._model_vector
        connection.send(
            messages.Hello(
                TrainerHello(
                    layout=vector.layout,
                    task=TASK,
                    task_version="",
                    frozen_digest=vector.frozen_digest,
                    device=str(vector.base.device),
                    evaluates=False,
                    pid=os.getpid(),
                )
            )
        )
        memory, descriptors = connection.receive_memory()
        self._vector, self._delta = map_vectors(descriptors, memory.total)
        if memory.initialise:
            vector.read(self._vector)
        connection.send(messages.Ready())

    # --- turns --------------------------------------------------------------------------------------------------

    def _next_turn(self) -> None:
        """Rank 0 waits for the daemon's next order; then all ranks load its weights."""
        turn = self._wait() if self._ranks.is_first else self._ranks.follow()
        if self._ranks.is_first:
            self._model_vector.load(self._vector)
        self._ranks.share_weights(self._model_vector)
        if turn is None:
            self.done = True
            return
        self.step_number, self._local_steps = turn.step, turn.local_steps
        self.workers, self.is_first = turn.workers, turn.is_first
        self._schedule.seek((turn.step - 1) * turn.local_steps)
        self._turn_steps = self._samples = 0
        self._means = MetricMeans()
        self._began_s = time.perf_counter()

    def _wait(self) -> Turn | None:
        assert self._connection is not None
        self._flush_warnings(self._connection)
        while True:
            try:
                message = self._connection.receive(RANKS_WAIT_S if self._ranks.count > 1 else None)
            except StopAsked:
                self._ranks.lead(None)
                return None
            except DaemonGone:
                self._ranks.lead_lost()
                raise
            match message:
                case None:
                    self._ranks.still_waiting()
                case messages.Train(turn, order):
                    self._turn = turn
                    found = Turn(order.step, order.local_steps, order.workers, order.is_first)
                    self._ranks.lead(found)
                    return found
                case messages.Evaluate(turn, _):
                    self._connection.send(messages.Evaluated(turn, None))
                case messages.Save(turn, path) | messages.Export(turn, path):
                    self._connection.send(self._written(turn, Path(path), save=isinstance(message, messages.Save)))

    def _report_turn(self) -> None:
        loss, metrics, samples = self._ranks.combine(self._means.means(), self._samples)
        self.samples_seen += samples
        if self._connection is None:
            return
        if not math.isfinite(loss) and "loss" in self._means:
            self._warn("loss_not_finite", f"the mean loss of step {self.step_number} is {loss}")
        metrics["learning_rate"] = float(self._optimizer.param_groups[0]["lr"])
        self._model_vector.delta(self._delta)
        seconds = time.perf_counter() - self._began_s
        report = StepReport(self.step_number, loss, samples, self._turn_steps, seconds, metrics)
        with contextlib.suppress(DaemonGone):  # The wait for the next turn reports it on all ranks.
            self._connection.send(messages.Trained(self._turn, report))

    def _report_progress(self) -> None:
        connection = self._connection
        if connection is None:
            return
        with contextlib.suppress(StopAsked, DaemonGone):
            connection.progress(self._turn_steps)
        if connection.interrupted() and self._ranks.count == 1:
            # The daemon no longer waits for this turn. With several ranks all finish it, to stay in step.
            self._next_turn()

    # --- numbers ------------------------------------------------------------------------------------------------

    def _skipped(self) -> bool:
        if self._scaler is None:
            return False
        before, self._scale = self._scale, self._scaler.get_scale()
        return self._scale < before

    def _warn(self, event: str, message: str) -> None:
        self._warned.append(messages.Warned(event, message))

    def _flush_warnings(self, connection: DaemonConnection) -> None:
        for warned in self._warned:
            connection.send(warned)
        self._warned.clear()

    # --- files --------------------------------------------------------------------------------------------------

    def _written(self, turn: int, path: Path, *, save: bool) -> messages.Written | messages.NotWritten:
        try:
            if save:
                self._save(path)
            else:
                self._model_vector.load(self._vector)
                export(self._model, path)
        except CannotWrite as error:
            return messages.NotWritten(turn, error.reason, error.hint)
        return messages.Written(turn)

    def _save(self, path: Path) -> None:
        own = {
            name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in self._state.items()
        }
        snapshot.save(
            path,
            {
                "optimizer": self._optimizer.state_dict(),
                "schedule": self._schedule.state(),
                "scaler": self._scaler.state_dict() if self._scaler is not None else None,
                "local_buffers": {name: value.cpu() for name, value in self._model_vector.local_buffers.items()},
                "state": own,
                "samples_seen": self.samples_seen,
            },
        )

    def _restore(self, path: Path) -> None:
        saved = snapshot.load(path)
        try:
            self._optimizer.load_state_dict(saved["optimizer"])
            self._schedule.restore(saved["schedule"])
            if self._scaler is not None and saved["scaler"] is not None:
                self._scaler.load_state_dict(saved["scaler"])
                self._scale = self._scaler.get_scale()
            for name, value in self._model_vector.local_buffers.items():
                value.copy_(saved["local_buffers"][name])
            for name, value in saved["state"].items():
                own: Any = self._state.get(name)
                if hasattr(own, "load_state_dict"):
                    own.load_state_dict(value)
                else:
                    self._state[name] = value
            self.samples_seen = int(saved["samples_seen"])
            snapshot.restore_random_state(saved["random"])
        except (KeyError, ValueError, RuntimeError) as error:
            raise TrainerFailed(
                f"the saved state {path} does not fit the script: {error}",
                "remove the file to continue with a fresh optimiser",
                fatal=True,
            ) from error
