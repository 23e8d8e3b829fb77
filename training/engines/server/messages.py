"""What passes between the servers and the workers of a parameter server.

A worker asks (`Poll`) and is answered (`Told`); a server asks nobody. A poll repeats every report that the worker
does not know to count. Keys and values are encoded (`training.values.encoding`). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from p2pnode.training.engines.server.acceptance import Contribution
from p2pnode.training.engines.server.core import Outcome
from p2pnode.training.engines.server.record import Failure, ServerRecord
from p2pnode.training.engines.server.tasks import MAX_KEYS, LeasedTask, Name
from p2pnode.training.errors import TrainingError
from p2pnode.training.values.encoding import Key, decode_key, decode_value, encode_key, encode_value

Count = Annotated[int, Meta(ge=0, le=1 << 62)]
EncodedKey = Annotated[bytes, Meta(min_length=2, max_length=257)]
#: A record says that the run is over: a node that has just started believes it after so long. Until then a server may
#: be about to begin a new one with the values of that (`training.engines.server.engine`).
LATE_S = 30.0
#: Reports that a worker repeats at most.
MAX_REPORTS = 1024
#: Bytes of a task with its values, and of one with its updates: a call takes hardly more (`training.engines.calls`).
MAX_TASK_BYTES = 56 * 1024 * 1024


class BadPoll(TrainingError):
    """Bytes that are no message of a parameter server."""


class NoServer(TrainingError):
    """No server answers, or the one that does runs something else."""


class HeldLease(msgspec.Struct, frozen=True, array_like=True):
    """A task as its worker knows it."""

    task: Count
    attempt: Count
    step: Count
    work: Annotated[list[tuple[EncodedKey, bytes | None]], Meta(max_length=MAX_KEYS)]


class Computed(msgspec.Struct, frozen=True, array_like=True):
    """The update of a task, computed from the values of `version`. With a `failure`, its `push` raised."""

    held: HeldLease
    version: Count
    updates: Annotated[list[tuple[EncodedKey, bytes]], Meta(max_length=MAX_KEYS)] = []
    failure: str = ""

    @property
    def name(self) -> Name:
        return self.held.task, self.held.attempt


class Poll(msgspec.Struct, frozen=True, array_like=True, tag="poll"):
    """A worker reports, and asks for a task unless it is at work on one, which it `holds`. A standby server only asks.
    `settings`: what it was started with, which must be equal everywhere; `run` counts the starts of the program.
    `made`: the highest version of which it was told that the values have it (`Told.made`); 0 for a worker that begins
    anew."""

    run: Count
    epoch: Count
    settings: str
    reports: Annotated[list[Computed], Meta(max_length=MAX_REPORTS)] = []
    holds: HeldLease | None = None
    is_standby: bool = False
    leaves: bool = False
    made: Count = 0


class TaskGiven(msgspec.Struct, frozen=True, array_like=True):
    """A task for the worker: the values of its keys, at `version`. Each poll that names it renews its lease."""

    held: HeldLease
    version: Count
    values: list[tuple[EncodedKey, bytes | None]]


class Told(msgspec.Struct, frozen=True, array_like=True, tag="told"):
    """The answer of the server. `server`: another one serves, or nobody yet. `outcomes` are those of the reports, by
    task and attempt. `failure`: the run ended by an error. `workers`: how many live. `made`: the version that the
    values have, and `version` the one that they are changed to. `lost`, of a run that ended: as in `ServerRecord`."""

    epoch: Count
    server: bytes
    version: Count = 0
    outcomes: list[tuple[int, int, Outcome]] = []
    task: TaskGiven | None = None
    ended: str = ""
    failure: Failure | None = None
    refused: str = ""
    workers: Count = 0
    made: Count = 0
    lost: Count = 0


Message = TypeVar("Message", Poll, Told)


def encode(message: Poll | Told) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_poll(data: bytes) -> Poll:
    """Raises `BadPoll`."""
    return _decoded(data, Poll)


def decode_told(data: bytes) -> Told:
    """Raises `BadPoll`."""
    return _decoded(data, Told)


def _decoded(data: bytes, kind: type[Message]) -> Message:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except ValueError as error:
        raise BadPoll(f"malformed {kind.__name__}: {error}") from error


def told_of_end(record: ServerRecord) -> Told:
    """What a node is told of a run that is over, when nobody serves it any more."""
    return Told(
        record.epoch,
        record.server,
        record.version,
        ended=record.ended,
        failure=record.failure,
        lost=record.lost,
    )


def held_by(lease: LeasedTask) -> HeldLease:
    """A lease, as its worker is told of it."""
    return HeldLease(lease.task, lease.attempt, lease.step, lease.work)


def lease_of(held: HeldLease, worker: bytes, now: float) -> LeasedTask:
    """A lease that its worker names."""
    return LeasedTask(held.task, held.attempt, worker, held.step, held.work, now, now)


def contribution_of(computed: Computed, worker: bytes) -> Contribution:
    """What a worker reports. Raises `BadValue` for bytes that are no value."""
    held = computed.held
    updates = [(decode_key(key), decode_value(value)) for key, value in computed.updates]
    return Contribution(worker, held.task, held.attempt, held.step, computed.version, updates)


def too_large(work: Sequence[tuple[bytes, bytes | None]], sent: Sequence[tuple[bytes, bytes | None]]) -> str:
    """Why a task cannot go over the wire with what is `sent` beside it, its values or its updates; empty: it can. It
    would be taken for a server that does not answer."""
    size_bytes = sum(len(key) + len(value or b"") for key, value in (*work, *sent))
    if size_bytes <= MAX_TASK_BYTES:
        return ""
    return f"they take {size_bytes:,} bytes together, and at most {MAX_TASK_BYTES:,} are allowed: make smaller tasks"


def task_too_large(task: HeldLease, values: Mapping[Key, bytes]) -> str:
    """Why a task cannot be given with the values of its keys; empty: it can."""
    wrong = too_large(task.work, [(key, own or values.get(decode_key(key))) for key, own in task.work])
    return f"the {len(task.work):,} values of a task: {wrong}" if wrong else ""


def encoded_updates(updates: list[tuple[Key, object]]) -> list[tuple[bytes, bytes]]:
    """What a worker computed, for its report. Raises `ValueNotEncodable`."""
    return [(encode_key(key), encode_value(key, update)) for key, update in updates]
