"""The protocol of a task: what a user writes to have his model trained by a swarm.

    class Mine:
        version = "1"

        def __init__(self, options, *, data_dir, seed, node_seed, device): ...
        def build(self): return TrainSpec(model, optimizer)
        def batches(self): ...                      # endless iterator
        def loss(self, model, batch): ...           # scalar tensor
        def evaluate(self, model): return {"accuracy": 0.9}, 1000

* `options` is `[training.options]` as it stands in the configuration; `data_dir` is absolute, or empty.
* Before the class is made all generators are seeded with `seed`, equal on all nodes, so that `build` gives the same
  weights everywhere; after `build` with `node_seed`, which differs: data order and dropout follow it.
* `device` is resolved ("cpu", "cuda:0"): the task puts the model there, and each batch, in `loss`.
* `batches` may give a plain iterator. If what it gives, or else the task itself, has `state_dict` and
  `load_state_dict`, the data position is part of a checkpoint; otherwise a restarted node begins its data anew.
* `evaluate` gets the shared model in evaluation mode, without gradients, and returns its metrics and the number of
  samples behind them. What it draws from the generators does not change the training.
* `version` is compared by all nodes: raise it when the task changes so that old and new nodes must not train together.
* `samples(batch)` may count a batch's samples; without it the first tensor's leading dimension does.

A fault that the user can mend is raised as `TaskError(what is wrong, what to do)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from training.errors import TrainingError

Options = TypeVar("Options", bound=msgspec.Struct)


@dataclass
class TrainSpec:
    """What `build` gives.

    `scheduler` is counted in optimiser steps and follows the swarm's step. `accumulate` batches make one optimiser
    step, their losses averaged. `scaler` is for float16 autocast; a step it skips is not counted. `clip_norm` bounds
    the gradient's norm; 0 does not.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None = None
    scaler: torch.amp.GradScaler | None = None
    accumulate: int = 1
    clip_norm: float = 0.0


class Task(Protocol):
    """The methods of a task; see the module."""

    version: str

    def __init__(self, options: dict[str, Any], *, data_dir: str, seed: int, node_seed: int, device: str) -> None: ...

    def build(self) -> TrainSpec: ...

    def batches(self) -> Iterator[Any]: ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor: ...

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], int]: ...


class TaskError(TrainingError):
    """A fault the user can mend: `reason` is one sentence, `hint` the next step."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


def read_options(kind: type[Options], options: dict[str, Any], task: str) -> Options:
    """`[training.options]` as the task's own struct, defaults filled in. Raises `TaskError`."""
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise TaskError(f"[training.options] of the task {task}: {error}", f"its options are {known}") from error
