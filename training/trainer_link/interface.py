"""The interface between daemon and trainer, implemented by a process (`training.supervisor`) and, in tests, a stub.

The daemon never imports torch. It orders a step; the trainer works on the shared vector and reports. Vectors pass
through shared memory: `vector` carries shared values to the trainer, `delta` the result back. Messages pass over a
socket (`training.trainer_link.messages`). The trainer has a base of its own, and goes on while its delta is exchanged.
Between a report with a delta and `encoded` the daemon encodes the delta. While `arrived` runs, the daemon does not
write `vector`. The trainer reports its next delta after that.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from p2pnode.training.errors import TrainingError
from p2pnode.training.layout import Layout
from p2pnode.training.trainer_link.data_messages import DataFromDaemon, DataFromTrainer
from p2pnode.training.trainer_link.engine_messages import EngineFromDaemon, EngineOpened, EngineSaid
from p2pnode.training.trainer_link.record_messages import RecordsFromTrainer, RecordsGranted

Vector = npt.NDArray[np.float32]

#: Ranges of values in a vector, `(first, end)`.
Ranges = Sequence[tuple[int, int]]

#: Steps, addresses, sizes and names of temporary files differ from one failure to the next.
_WITH_DIGITS = re.compile(r"\S*\d\S*")

SAME_VALUES = "load it from one file at every start, or seed what draws it by a constant"


class TrainerHello(msgspec.Struct, frozen=True):
    """Describes the trainer's model, once it is built.

    `task` and `task_version` name what is trained. `frozen_digest` covers the tensors that are not in the vector;
    `frozen` has a fingerprint of each by name. `host_bytes` is the memory of this machine that gradients, optimiser and
    the optimiser's copy for a checkpoint will take from the first step on (`training.trainer.script_arguments`),
    `device_bytes` that of a GPU which the base of the model takes. `gpus` has what the driver calls each CUDA device
    ("GPU-…"), by its name here.
    """

    layout: Layout
    task: str
    task_version: str
    frozen_digest: str
    device: str
    pid: int
    host_bytes: int = 0
    device_bytes: int = 0
    gpus: dict[str, str] = {}
    frozen: dict[str, str] = {}
    #: A script that uses an engine of named values instead of training a model.
    engine: EngineOpened | None = None

    def differing(self, other: TrainerHello) -> str:
        """The first tensor beside the vector that the two hold with different values; empty if there is none."""
        names = sorted(self.frozen.keys() | other.frozen.keys())
        return next((name for name in names if self.frozen.get(name) != other.frozen.get(name)), "")


class StepOrder(msgspec.Struct, frozen=True):
    """Orders one turn of local training. `step` is the step to complete; the first one is 1. With 0 `local_steps` only
    the delta of what has added up is wanted. `node_index` counts the known workers whose ids come before this node's: 0
    is the first, and `is_first`.

    The rest is for one of several trainers of a node (`training.devices`). It `asks` before each optimiser step what
    the next iteration is, and the answer, not `local_steps`, ends the turn; `done` counts the optimiser steps of this
    step before. Each of its turns begins with `vector`, or `at_delta` with `vector + delta`, or with `vector` if a
    value of that delta is not finite. `local_pull` and `global_pull`: so much of the way to the leaders' values each
    optimiser step goes. `loss_window`: batches of `recent_loss`. `keeps_delta`: report without writing `delta`, because
    a merge follows (`MergeOrder`). `continues`: begin where that merge has ended. `known_step`: the step whose shared
    values `vector` has.
    """

    step: int
    local_steps: int
    workers: float
    is_first: bool
    node_index: int = 0
    # Of one of several trainers:
    asks: bool = False
    done: int = 0
    local_pull: float = 0.0
    global_pull: float = 0.0
    loss_window: int = 0
    at_delta: bool = False
    known_step: int = 0
    keeps_delta: bool = False
    continues: bool = False


class MergeOrder(msgspec.Struct, frozen=True):
    """Orders trainer `index` of a node to merge the delta that it keeps with those of the other `members`, by
    `torch.distributed`. Group number `group` meets by the file `place`. The deltas are summed with their weights, and
    the member that `writes` puts the mean into `delta`. A single member writes its own delta."""

    index: int
    members: tuple[int, ...]
    group: int
    place: str
    backend: str
    weight: float = 1.0
    writes: bool = True
    timeout_s: float = 0.0


class StepReport(msgspec.Struct, frozen=True):
    """The result of a `StepOrder`: `seconds` is the time spent training, `loss` the mean over its optimiser steps.
    `recent_loss` is that of the last `loss_window` batches; None without so many, or where it is not finite.
    `has_delta`: the progress is in `delta`; otherwise the exchange of the last one had not ended, and it goes on adding
    up. `is_finite` is False if a value of it is not: the trainer has taken it back, and the model is at its base."""

    step: int
    loss: float
    samples: int
    optimizer_steps: int
    seconds: float
    metrics: dict[str, float]
    recent_loss: float | None = None
    is_finite: bool = True
    has_delta: bool = True


class Evaluation(msgspec.Struct, frozen=True):
    """Metrics of the shared values over `samples` samples."""

    step: int
    metrics: dict[str, float]
    samples: int


class TensorSource(msgspec.Struct, frozen=True, array_like=True):
    """One entry of the model's `state_dict`, under its canonical name, and where its values are.

    `vector`: the vector's entry `source`, to be converted to `dtype`. `fixed`: the tensor `source` of the file that the
    trainer writes once. `local`: `ModelDescription.local[source]`. `dtype` is torch's name, as "bfloat16".
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: Literal["vector", "fixed", "local"]
    source: str


class ModelDescription(msgspec.Struct, frozen=True):
    """What a complete file of the model needs beside the vector (`training.files.model_file`).

    `fixed_digest` covers the tensors that training never changes: frozen parameters and constant buffers; empty: there
    are none. `local` has the bytes of each integer buffer, as this node has them now.
    """

    layout_digest: str
    fixed_digest: str
    tensors: tuple[TensorSource, ...]
    local: dict[str, bytes]


class BusyWith(msgspec.Struct, frozen=True):
    """A script's own statement that it works on something else than a step, since `since` (monotonic seconds)."""

    what: str
    since: float


def cause_of(reason: str) -> str:
    """The reason without the words that have digits: equal for two failures of the same kind."""
    return _WITH_DIGITS.sub("#", reason)


class TrainerFailed(TrainingError):
    """The trainer could not start, or has ended. `reason` is one sentence, `hint` the next step for the user.

    `fatal` is True if another start would fail in the same way: the task does not import, the data is missing. `cause`
    is equal for failures of one kind (`training.failures`); empty: the trainer was ended from outside.
    """

    def __init__(self, reason: str, hint: str = "", *, fatal: bool = False, cause: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint
        self.fatal = fatal
        self.cause = cause_of(reason) if cause is None else cause


class Restored(NamedTuple):
    """What a trainer starts from: whether its `vector` has been filled, and the file of its own state, or none."""

    has_vector: bool = False
    file: str = ""


#: Called at the first start, when the model is built and `vector`, `float32[total]`, is allocated: what to start from.
Resume = Callable[[TrainerHello, Vector], Awaitable[Restored]]


class TrainerLeft(TrainerFailed):
    """The script has returned before the end of the run, with exit code 0, or has called `swarm.leave()`.

    Nothing failed: the node leaves too.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason, fatal=True)


class TrainerEnd(msgspec.Struct, frozen=True):
    """How the last process ended. `exit_code` is minus the number of the signal that ended it.

    `cut_short`: it was a script that had not ended by itself in its time, so it was killed.
    """

    exit_code: int = 0
    cut_short: bool = False


class Trainer(Protocol):
    """One trainer. `start` may be called again after `TrainerFailed`; it reuses the buffers, so the vector survives a
    crash of the process."""

    vector: Vector
    delta: Vector

    @property
    def state(self) -> str:
        """One of `stopped`, `starting`, `running`, `hung`, `crashed`, `finishing`, `left`."""
        ...

    @property
    def is_script(self) -> bool:
        """Whether it is the user's own script, which ends by itself."""
        ...

    @property
    def busy(self) -> BusyWith | None:
        """What the script has said it is busy with, if it has."""
        ...

    @property
    def findings(self) -> list[tuple[str, str]]:
        """What the trainer has found wrong, each with what to do."""
        ...

    async def start(self, restore: str = "", *, resume: Resume | None = None) -> TrainerHello:
        """Start the process and wait until its model is built. After the first start `vector` holds the model's own
        initial values, unless `resume` has filled it. `restore` names a file written by `save`: optimiser, schedule,
        random state, data position; `resume` decides by the model which one it is. Raises `TrainerFailed`."""
        ...

    async def train(self, order: StepOrder) -> StepReport:
        """Run `order.local_steps` optimiser steps from where the last turn ended, and write `delta` if the exchange of
        the last one has ended. The first turn after a start loads `vector`. Raises `TrainerFailed`, and `TrainerLeft`
        if the script wants no further turn."""
        ...

    def encoded(self) -> None:
        """`delta` holds what goes to the owners of it, and nothing has been sent yet: the trainer adds that to its
        base, and the rest stays progress."""
        ...

    async def arrived(
        self, step: int, keeps_base: Ranges = (), takes_back: Ranges = (), adds_delta: Ranges = ()
    ) -> None:
        """End the exchange of the last delta: `vector` holds the shared values of `step`. Returns when the model has
        moved to them, or when the trainer has failed. It moves at its next optimiser step, before a cut, or while it
        waits for an order.

        Each shard is one of three. Mostly the values contain the delta, and the trainer takes them. They came without
        it in the ranges `adds_delta`: it adds the delta to them. Nothing came, or perhaps a value without a delta that
        the base has, in the ranges `keeps_base`: it takes nothing. Beside that it takes back the ranges `takes_back` of
        `delta`: these were not sent after all, and are progress again."""
        ...

    async def evaluate(self, step: int) -> Evaluation | None:
        """Evaluate the shared values that the trainer knows; None if it has no evaluation of its own. Raises
        `TrainerFailed`."""
        ...

    async def save(self, path: str) -> Awaitable[None]:
        """Copy the trainer's own state, and return when the next order may be given. The awaitable is done when the
        copy is in the file, written whole or not at all. Both raise `TrainerFailed`; a state that is not finite is not
        written."""
        ...

    async def describe(self, folder: str, *, wait: bool = False) -> ModelDescription:
        """Describe the whole model; the tensors that training never changes are written to `folder`, an
        absolute path, once.

        With `wait` it returns when that file is complete, otherwise the trainer writes it in the background. An empty
        `folder` writes nothing. Raises `TrainerFailed`."""
        ...

    def take_measured(self) -> list[Evaluation]:
        """The evaluations that a user's own script has reported since the last call, oldest first."""
        ...

    def on_data(self, handler: Callable[[DataFromTrainer | RecordsFromTrainer], None]) -> None:
        """Call `handler` with every message about shared data (`training.sharing`) or dispatched records
        (`training.dispatch`) that the trainer sends; replaces the previous handler."""
        ...

    def send_data(self, message: DataFromDaemon | RecordsGranted | EngineFromDaemon) -> None:
        """Send a message about shared data, records or an engine; without a running trainer nothing happens."""
        ...

    def on_engine(self, handler: Callable[[EngineSaid], None]) -> None:
        """Call `handler` with every message of a script that uses an engine; replaces the previous handler."""
        ...

    async def ended(self) -> TrainerFailed:
        """Wait until the process ends by itself; how it did: `TrainerLeft` for exit code 0."""
        ...

    async def finish(self, reason: str, finish_s: float) -> TrainerEnd:
        """The run has ended: tell the process, wait `finish_s` for it to end by itself, then end it by signal."""
        ...

    async def stop(self, stop_s: float = 0.0) -> TrainerEnd:
        """The node leaves: as `finish`, within `stop_s`; idempotent. Returns how the last process ended."""
        ...
