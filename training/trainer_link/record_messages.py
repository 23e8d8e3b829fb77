"""Messages between daemon and trainer about records that a master dispatches, and where a script's records come from.

The trainer asks for one task after the other and reports, with the delta of each turn, how far each is trained. The
daemon counts that when the turn's step is counted (`training.dispatch.worker`). Pure.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from p2pnode.training.dispatch.chunks import DatasetChunk

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class RecordSource(msgspec.Struct, frozen=True):
    """`[dispatch]` as the trainer needs it: `patterns` name files below `folder`, which is absolute. `passes` 0: for
    ever; `seed` is the run's."""

    source: Literal["local", "shared", "master"]
    patterns: list[str]
    folder: str
    shuffle: bool
    passes: int
    seed: int


class RecordTask(msgspec.Struct, frozen=True, array_like=True):
    """A leased task, with the paths of this machine. `attempt` is its fencing token. Its records come in an order that
    `order` seeds (0: that of the files), and the first `skip` of that order are trained already."""

    task: Number
    attempt: Number
    pass_number: Number
    order: Number
    skip: Number
    chunks: list[DatasetChunk]

    @property
    def records(self) -> int:
        return sum(chunk.records for chunk in self.chunks)


class TaskTrained(msgspec.Struct, frozen=True, array_like=True):
    """The first `trained` records of an attempt are trained."""

    task: Number
    attempt: Number
    trained: Number


class RecordsOpened(msgspec.Struct, frozen=True, tag="records_opened"):
    """A trainer begins to draw records: tasks that an earlier one had are granted again, from where it stopped."""


class RecordsWanted(msgspec.Struct, frozen=True, tag="records_wanted"):
    """Asks for a task; answered by a `RecordsGranted` of the same `number`. Without `wait` the answer may be that there
    is none now: the trainer has records that it will report first."""

    number: int
    wait: bool


class RecordsTrained(msgspec.Struct, frozen=True, tag="records_trained"):
    """Sent before the `Trained` of the same turn, which trains `step`: the tasks whose progress changed in it."""

    turn: int
    step: Number
    trained: list[TaskTrained]


class RecordsUnreadable(msgspec.Struct, frozen=True, tag="records_unreadable"):
    """The trainer cannot read the task, and draws no more of it. `missing`: the file is not on this machine."""

    task: Number
    attempt: Number
    reason: Annotated[str, Meta(max_length=4096)]
    missing: bool


class RecordsGranted(msgspec.Struct, frozen=True, tag="records_granted"):
    """The answer to `RecordsWanted`. Without a task there is none now, or, where it `is_over`, none will ever be."""

    number: int
    task: RecordTask | None
    is_over: bool = False


RecordsFromTrainer = RecordsOpened | RecordsWanted | RecordsTrained | RecordsUnreadable
