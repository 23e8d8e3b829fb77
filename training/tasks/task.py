"""The protocol of a task, which a user implements to train a model of their own in a swarm.

    class Mine:
        version = "1"

        def __init__(self, options, *, data_dir, seed, node_seed, device): ...
        def build(self): return TrainSpec(model, optimizer)
        def batches(self): ...                      # endless iterator
        def loss(self, model, batch): ...           # scalar tensor
        def evaluate(self, model): return {"accuracy": 0.9}, 1000

* `options` is `[training.options]` of the configuration; `data_dir` is absolute, or empty.
* Before the class is constructed all generators are seeded with `seed`, which is equal on all nodes, so that `build`
  gives the same weights everywhere. After `build` they are seeded with `node_seed`, which differs: data order and
  dropout depend on it.
* `device` is resolved ("cpu", "cuda:0"): the task moves the model to it, and in `loss` each batch.
* `batches` may return a plain iterator. If the iterator, or else the task, has `state_dict` and `load_state_dict`, the
  data position is part of a checkpoint. Otherwise a restarted node starts its data from the beginning.
* `evaluate` gets the shared model in evaluation mode, without gradients. It returns metrics and the number of samples
  they are based on. Its use of the generators does not affect the training.
* All nodes must have the same `version`: increase it when old and new nodes must not train together.
* `decode(record)` makes a sample of a dispatched record, or `from_example(example)` of its named values. A
  `collate(samples)` may join them, and `batch_size` says how many. With `dispatch.records` set these are used instead
  of `batches` (docs/dispatch.md).
* `samples(batch)` may count a batch's samples; the default is the first tensor's leading dimension.

Raise `TaskError(what is wrong, what to do)` for faults that the user can fix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from p2pnode.training.errors import TrainingError

Options = TypeVar("Options", bound=msgspec.Struct)


@dataclass
class TrainSpec:
    """The result of `build`.

    `optimizer` is one or several; together they hold all that is trained. `scheduler`, one or several, counts optimiser
    steps and follows the swarm's step. `accumulate` batches make one optimiser step, with their mean loss. `scaler` is
    for float16 autocast; a step it skips does not count. `clip_norm` bounds the gradient's norm; 0 means no bound. With
    `include_frozen` frozen parameters are exchanged too, so that they may be unfrozen at any step. `on_load` is called
    whenever weights were loaded into the model: it copies them to where an optimiser has copies of its own.
    """

    model: nn.Module
    optimizer: Optimizer | Sequence[Optimizer]
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None
    scaler: torch.amp.GradScaler | None = None
    accumulate: int = 1
    clip_norm: float = 0.0
    include_frozen: bool = False
    on_load: Callable[[], object] | None = None


class Task(Protocol):
    """The methods of a task; see the module's docstring."""

    version: str

    def __init__(self, options: dict[str, Any], *, data_dir: str, seed: int, node_seed: int, device: str) -> None: ...

    def build(self) -> TrainSpec: ...

    def batches(self) -> Iterator[Any]: ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor: ...

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], int]: ...


class TaskError(TrainingError):
    """A fault that the user can fix: `reason` is one sentence, `hint` the next step."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


def read_options(kind: type[Options], options: dict[str, Any], task: str) -> Options:
    """Convert `[training.options]` to the task's own struct, with defaults. Raises `TaskError`."""
    try:
        return msgspec.convert(options, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise TaskError(f"[training.options] of the task {task}: {error}", f"its options are {known}") from error
