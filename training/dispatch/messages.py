"""What nodes and their master tell one another about records: one request, `dispatch`, with one answer each. Pure.

Every request may be repeated: a task is named by its attempt, and a request for a task names those that the worker
has, so that an answer that was lost is given again. Requests about tasks name the queue: those of another one are
answered as if there were no data set, or no such attempt. The sender is the node that the envelope proves.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from p2pnode.overlay.ids import ID_BYTES
from p2pnode.overlay.kademlia.messages import PACKED_V4_BYTES, PACKED_V6_BYTES
from p2pnode.overlay.peers import Counter
from p2pnode.training.dispatch.answers import MAX_AVOIDED, MAX_HELD, Answer, Cause, Held, QueueStatus, ReportAnswer
from p2pnode.training.dispatch.chunks import FileSummary
from p2pnode.training.trainer_link.record_messages import RecordTask

#: Names of the two requests.
DISPATCH = "dispatch"
MASTER = "dispatch_master"
#: Bytes of a request or an answer, which travel in bodies: a data set may have many files, and a task many chunks.
MAX_MESSAGE_BYTES = 8 << 20
#: Files of a data set: a report of so many still fits a request.
MAX_FILES = 1 << 17
#: Characters of a reason, or of a name.
MAX_TEXT = 4096

#: Names the queue that tasks and attempts are of.
Identity = Annotated[bytes, Meta(max_length=64)]
HeldList = Annotated[list[Held], Meta(max_length=MAX_HELD)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]


class MasterRecord(msgspec.Struct, frozen=True, array_like=True):
    """Who serves: its packed contact, and the epoch of its store, which rises with every change of the master.
    `identity` names the queue, and is empty before a data set is registered."""

    contact: Annotated[bytes, Meta(min_length=PACKED_V4_BYTES, max_length=PACKED_V6_BYTES)]
    epoch: Counter
    identity: Identity = b""

    @property
    def node_id(self) -> bytes:
        return self.contact[:ID_BYTES]


class WhoServes(msgspec.Struct, frozen=True, array_like=True):
    """Request and answer of `dispatch_master`: the newest record that the sender knows; None: none."""

    record: MasterRecord | None


class QueueCounts(msgspec.Struct, frozen=True, array_like=True):
    """The queue, for the `/status` of its workers. `store` is "sqlite" or "etcd"."""

    queue: QueueStatus
    discarded: Counter
    store: Annotated[str, Meta(max_length=64)]


# -- requests


class ReportDataset(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """The files that the sender has. Answered by `DatasetTold`."""

    files: Annotated[list[FileSummary], Meta(max_length=MAX_FILES)]


class RegisterDataset(msgspec.Struct, frozen=True, array_like=True, tag="register"):
    """The chunks of all files (`ChunkTable.encode`), asked for from the first worker. Answered by `DatasetTold`."""

    table: bytes


class GetTask(msgspec.Struct, frozen=True, array_like=True, tag="get"):
    """Asks for a task. `held`: those that the sender has, so that a lease whose answer was lost is granted again.
    `avoid`: tasks that it cannot read. Answered by `TaskTold`."""

    identity: Identity
    held: HeldList
    avoid: Annotated[list[Counter], Meta(max_length=MAX_AVOIDED)]


class EndTask(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """The attempt has ended. Without a `cause` all its records are trained, and their steps counted; otherwise it is
    given back for one of `training.dispatch.answers.REPORTED_CAUSES`, with its first `trained` records trained.
    Answered by `ReportsTold`."""

    identity: Identity
    task: Counter
    attempt: Counter
    cause: Cause | None
    trained: Counter


class RenewTasks(msgspec.Struct, frozen=True, array_like=True, tag="renew"):
    """The sender lives and trains on these. Answered by `ReportsTold`."""

    identity: Identity
    held: HeldList


# -- answers


class DatasetTold(msgspec.Struct, frozen=True, array_like=True, tag="dataset"):
    """`is_wanted`: nothing is registered, send the table. Otherwise `refused` says why the sender
    gets no tasks, or is empty."""

    is_wanted: bool
    refused: Text
    identity: Identity


class TaskTold(msgspec.Struct, frozen=True, array_like=True, tag="task"):
    """`task`, whose paths are names of files, is leased for `lease_s` from now on. With any other `answer` it is None,
    and the worker asks again after `retry_after_s`, unless the job is over."""

    answer: Answer
    task: RecordTask | None
    lease_s: float
    retry_after_s: float
    counts: QueueCounts | None


class ReportsTold(msgspec.Struct, frozen=True, array_like=True, tag="reports"):
    """One answer for each attempt named, in the order of the request."""

    answers: list[ReportAnswer]
    counts: QueueCounts | None


class TryAgain(msgspec.Struct, frozen=True, array_like=True, tag="again"):
    """Nothing has happened. `record`: who serves, if it is not the receiver; None: wait a moment."""

    reason: Text
    record: MasterRecord | None = None


DispatchRequest = ReportDataset | RegisterDataset | GetTask | EndTask | RenewTasks
DispatchAnswer = DatasetTold | TaskTold | ReportsTold | TryAgain

A = TypeVar("A", DatasetTold, TaskTold, ReportsTold)

_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS: msgspec.msgpack.Decoder[DispatchRequest] = msgspec.msgpack.Decoder(DispatchRequest)
_ANSWERS: msgspec.msgpack.Decoder[DispatchAnswer] = msgspec.msgpack.Decoder(DispatchAnswer)
_WHO = msgspec.msgpack.Decoder(WhoServes)


def encode(message: DispatchRequest | DispatchAnswer | WhoServes) -> bytes:
    return _ENCODER.encode(message)


def decode_request(payload: bytes) -> DispatchRequest:
    """Raises `msgspec.DecodeError`."""
    return _REQUESTS.decode(payload)


def decode_answer(payload: bytes) -> DispatchAnswer:
    """Raises `msgspec.DecodeError`."""
    return _ANSWERS.decode(payload)


def decode_who(payload: bytes) -> WhoServes:
    """Raises `msgspec.DecodeError`."""
    return _WHO.decode(payload)
