"""What a transition changes, as absolute values: the entry of the log, and the only thing that changes the queue.

A replay needs no rules, so settings may differ after a restart. Pure.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from training.dispatch.answers import Registration
from training.errors import TrainingError

FORMAT = 1


class StateDamaged(TrainingError):
    """A stored entry or snapshot cannot be read, or contradicts the others; the text says what."""


class TaskState(IntEnum):
    """Where a task is. `REOPENED` is todo too: its newest attempt timed out or its worker died, and may finish late."""

    TODO = 0
    LEASED = 1
    DONE = 2
    FAILED = 3
    REOPENED = 4


class TaskRow(msgspec.Struct, array_like=True):
    """The small mutable state of a task, 20 bytes in memory.

    `attempt` is the newest one, `holder` four bytes of a hash of its worker, `finished` the last attempt that counted.
    """

    task: int
    state: int
    attempt: int
    holder: int
    finished: int
    errors: int
    timeouts: int
    deaths: int


class LeaseRow(msgspec.Struct, array_like=True):
    """A lease in force, or a new value of `trained` for one. It ends when its task's state is no longer `LEASED`."""

    task: int
    worker: bytes
    duration_s: float
    trained: int


class HeadRow(msgspec.Struct, array_like=True):
    """The counters of the queue: `cursor` tasks of the pass were handed out for the first time, and `mean_task_s` is
    the mean of `observed` task times, the later ones with a weight of 1/20."""

    pass_number: int = 1
    cursor: int = 0
    end: str = ""
    mean_task_s: float = 0.0
    observed: int = 0


class SaveRow(msgspec.Struct, array_like=True):
    """Who may save the model; an empty holder: nobody."""

    holder: bytes = b""
    token: int = 0
    duration_s: float = 0.0


class Changes(msgspec.Struct, array_like=True):
    """One entry of the log. In this order: a roll makes every task todo with its failures forgotten, `taken` tasks
    leave the front of the returned ones, rows and leases are set, `returned` tasks join at the end."""

    format: int = FORMAT
    registration: Registration | None = None
    rolled: bool = False
    taken: int = 0
    rows: list[TaskRow] = []
    leases: list[LeaseRow] = []
    returned: list[int] = []
    #: (task, records): how many records of an open task are trained; 0 forgets it.
    skips: list[tuple[int, int]] = []
    head: HeadRow | None = None
    save: SaveRow | None = None

    def __bool__(self) -> bool:
        return bool(
            self.registration
            or self.rolled
            or self.taken
            or self.rows
            or self.leases
            or self.returned
            or self.skips
            or self.head
            or self.save
        )


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Changes)


def encode(changes: Changes) -> bytes:
    return _ENCODER.encode(changes)


def decode(entry: bytes) -> Changes:
    """Raises `StateDamaged`."""
    try:
        changes = _DECODER.decode(entry)
    except msgspec.MsgspecError as error:
        raise StateDamaged(f"an entry of the log cannot be read: {error}") from error
    if changes.format != FORMAT:
        raise StateDamaged(f"an entry of the log has format {changes.format}, this program reads {FORMAT}")
    return changes
