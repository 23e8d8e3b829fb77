"""The trainer as the daemon sees it: a door like the network's, with a real process or a stub behind it.

The daemon never imports torch. It orders a step, the trainer works on the shared vector and reports. Vectors pass
through shared memory (`vector`: base in, daemon → trainer; `delta`: result out, trainer → daemon), words pass over the
link (`training.trainer_link.messages`). From an order until its answer the daemon leaves `vector` as it is: it is the
base of the delta.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from training.errors import TrainingError
from training.layout import Layout

Vector = npt.NDArray[np.float32]


class TrainerHello(msgspec.Struct, frozen=True):
    """What a trainer says of its model when it has built it.

    `frozen_digest` covers the tensors that are not in the vector; `task` and `task_version` name what is trained.
    `local_steps` is what it was told, or what `attach` asked for. `evaluates` is False for a user's own loop.
    """

    layout: Layout
    task: str
    task_version: str
    frozen_digest: str
    device: str
    evaluates: bool
    pid: int


class StepOrder(msgspec.Struct, frozen=True):
    """One turn of local training. `step` is the step to be completed: the first one is 1."""

    step: int
    local_steps: int
    workers: float
    is_first: bool


class StepReport(msgspec.Struct, frozen=True):
    """What came of a `StepOrder`; `seconds` is the time spent training, `loss` the mean over its optimiser steps."""

    step: int
    loss: float
    samples: int
    optimizer_steps: int
    seconds: float
    metrics: dict[str, float]


class Evaluation(msgspec.Struct, frozen=True):
    """Metrics of the shared vector as loaded, over `samples` samples."""

    step: int
    metrics: dict[str, float]
    samples: int


class TrainerFailed(TrainingError):
    """The trainer could not start or died. `reason` is one clear sentence, `hint` says what to do.

    `fatal` is True where another start would fail the same way: the task does not import, the data is missing.
    """

    def __init__(self, reason: str, hint: str = "", *, fatal: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint
        self.fatal = fatal


class Trainer(Protocol):
    """One trainer. `start` may be called again after `TrainerFailed`: the same buffers are used, so the vector
    survives a crash of the process. After `start` the new process has not yet loaded `vector`; every `train` and
    `evaluate` loads it first."""

    vector: Vector
    delta: Vector

    @property
    def state(self) -> str:
        """One of `stopped`, `starting`, `running`, `hung`, `crashed`."""
        ...

    async def start(self, restore: str = "") -> TrainerHello:
        """Start the process and wait until its model stands. On the first start `vector` then holds the model's own
        initial values. `restore` names a file written by `save`: optimiser, schedule, random state, data position.
        Raises `TrainerFailed`."""
        ...

    async def train(self, order: StepOrder) -> StepReport:
        """Load `vector`, run `order.local_steps` optimiser steps, write `delta`. Raises `TrainerFailed`."""
        ...

    async def evaluate(self, step: int) -> Evaluation | None:
        """Evaluate `vector`; None where the trainer has no evaluation of its own. Raises `TrainerFailed`."""
        ...

    async def save(self, path: str) -> None:
        """Write the trainer's own state to a file, whole or not at all. Raises `TrainerFailed`."""
        ...

    async def export(self, path: str) -> None:
        """Write the model with `vector` loaded: safetensors, or a plain `state_dict` for other endings."""
        ...

    async def stop(self) -> None:
        """End the process, politely and then not; idempotent."""
        ...
