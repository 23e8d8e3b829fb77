"""Messages between daemon and trainer over a Unix socket, and their framing.

A message is a tagged MessagePack struct after its length (u32, big-endian). The trainer connects, the daemon sends
`Start` first, and at most one order is outstanding. Every order carries a `turn`, which its answer repeats: the daemon
drops answers to orders it has cancelled. Vectors are not sent here; `Memory` carries the two descriptors of the shared
buffers (`training.trainer_link.shared_memory`).

`Decoder` accepts bytes in any pieces, from either side's socket. Pure.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, TypeVar

import msgspec

from p2pnode.training.errors import TrainingError
from p2pnode.training.trainer_link.data_messages import DataFromDaemon, DataFromTrainer
from p2pnode.training.trainer_link.engine_messages import EngineFromDaemon, EngineFromScript
from p2pnode.training.trainer_link.interface import (
    Evaluation,
    MergeOrder,
    ModelDescription,
    StepOrder,
    StepReport,
    TrainerHello,
)
from p2pnode.training.trainer_link.record_messages import RecordsFromTrainer, RecordsGranted, RecordSource

#: Environment variables for the trainer: the path of the socket, and the daemon's process id.
SOCKET_VARIABLE = "P2PNODE_TRAINER_SOCKET"
DAEMON_VARIABLE = "P2PNODE_DAEMON_PID"
#: A file beside the socket. A script that works without its node, as with map-reduce, makes it: its end is no failure.
ALONE_FILE = "works_alone"

Message = TypeVar("Message")

_LENGTH = struct.Struct(">I")

#: The largest message is `Hello`, with some 100 bytes per tensor: enough for half a million tensors.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The daemon's first message. `seed` is the run's, `node_seed` the node's, and `start_seed` that of this start.
    `records` says where the records of `[dispatch]` come from; None: nowhere. This trainer is number `device_index` of
    the `device_count` of its node."""

    task: str
    data_dir: str
    options: dict[str, Any]
    device: str
    threads: int
    seed: int
    node_seed: int
    local_steps: int
    start_seed: int = 0
    records: RecordSource | None = None
    device_index: int = 0
    device_count: int = 1


class Memory(msgspec.Struct, frozen=True, tag="memory"):
    """The shared buffers, `float32[total]` each; their descriptors (vector, delta) travel with the message. More
    follow for trainers that are pulled to leaders: the values of the node's leader, and perhaps of the swarm's.

    `initialise` asks the trainer to write its model's own values into the vector. `restore` names a file written by an
    earlier `Save`, or is empty.
    """

    total: int
    initialise: bool
    restore: str = ""


class Train(msgspec.Struct, frozen=True, tag="train"):
    turn: int
    order: StepOrder


class Merge(msgspec.Struct, frozen=True, tag="merge"):
    """As one of several trainers of a node: merge the delta that was kept."""

    turn: int
    order: MergeOrder


class Evaluate(msgspec.Struct, frozen=True, tag="evaluate"):
    turn: int
    step: int


class Save(msgspec.Struct, frozen=True, tag="save"):
    turn: int
    path: str


class Describe(msgspec.Struct, frozen=True, tag="describe"):
    """Describe the model; see `Trainer.describe`."""

    turn: int
    folder: str
    wait: bool


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The daemon no longer waits for this turn: abandon it at the next optimiser step, without an answer."""

    turn: int


class DeltaEncoded(msgspec.Struct, frozen=True, tag="delta_encoded"):
    """`delta` holds what goes to the owners of the last delta; see `Trainer.encoded`."""


class ValuesArrived(msgspec.Struct, frozen=True, tag="values_arrived"):
    """The exchange of the last delta has ended, and `vector` holds the shared values of `step`; see
    `Trainer.arrived`."""

    step: int
    keeps_base: list[tuple[int, int]] = []
    takes_back: list[tuple[int, int]] = []
    adds_delta: list[tuple[int, int]] = []


class StepAnswer(IntEnum):
    """What a trainer does next. The numbers are those of LSGD's answers."""

    LOCAL = 0
    DISTRIBUTED = 1
    STOP = 2


class StepWanted(msgspec.Struct, frozen=True, tag="step_wanted"):
    """One of several trainers of a node, which is ordered to (`StepOrder.asks`), asks before each optimiser step what
    the next iteration of this turn is (`training.devices.cycle`), and waits for its answer; `number` counts the
    requests of the turn from 1."""

    turn: int
    number: int


class StepAnswered(msgspec.Struct, frozen=True, tag="step_answered"):
    """The answer to the `StepWanted` of the same turn and number. With `DISTRIBUTED` the trainer reports the turn."""

    turn: int
    number: int
    answer: StepAnswer


class RunEnded(msgspec.Struct, frozen=True, tag="run_ended"):
    """The run has ended, for `reason`. A user's own loop sees `swarm.done`, and the process has `finish_s` to end by
    itself."""

    reason: str
    finish_s: float


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The node leaves: end at the next optimiser step. A user's own loop sees `swarm.done`, and the process has
    `stop_s` to end by itself."""

    stop_s: float


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    hello: TrainerHello


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The buffers are mapped, and initialised if `Memory` asked for it."""


class SignOfLife(msgspec.Struct, frozen=True, tag="alive"):
    """All is well: the silence begins anew. Sent after optimiser steps too."""


class Busy(msgspec.Struct, frozen=True, tag="busy"):
    """From now on, until `Idle`, silence is no hang. `what` is shown in `/status`."""

    what: str


class Idle(msgspec.Struct, frozen=True, tag="idle"):
    """The end of `Busy`."""


class LeaveRequested(msgspec.Struct, frozen=True, tag="leave_requested"):
    """The script wants its node to leave. It answers orders to save and export until `RunEnded`."""


class ValuesEntered(msgspec.Struct, frozen=True, tag="values_entered"):
    """The model has moved to the values that arrived: `vector` may change."""


class Trained(msgspec.Struct, frozen=True, tag="trained"):
    turn: int
    report: StepReport


class Merged(msgspec.Struct, frozen=True, tag="merged"):
    """The answer to a `Merge`. Not `is_done`: the group has failed, and the trainer has its delta as it was."""

    turn: int
    is_done: bool


class Evaluated(msgspec.Struct, frozen=True, tag="evaluated"):
    turn: int
    evaluation: Evaluation | None


class Copied(msgspec.Struct, frozen=True, tag="copied"):
    """The trainer has a copy of its own state, and takes the next order; `Written` or `NotWritten` follows."""

    turn: int


class Written(msgspec.Struct, frozen=True, tag="written"):
    """The file of a `Save` is in place."""

    turn: int


class Described(msgspec.Struct, frozen=True, tag="described"):
    turn: int
    description: ModelDescription


class Measurement(msgspec.Struct, frozen=True, tag="measured"):
    """A user's own script has evaluated the shared model of `step`, without an order."""

    step: int
    metrics: dict[str, float]
    samples: int


class NotWritten(msgspec.Struct, frozen=True, tag="not_written"):
    """The file could not be written; the trainer continues."""

    turn: int
    reason: str
    hint: str


class Warned(msgspec.Struct, frozen=True, tag="warned"):
    """A warning for the user; training continues. `event` is a constant name for the log.

    With `do`, what to do, it is a finding: `/status` shows it until the trainer ends, or until the same event comes
    with another message. An empty message ends it.
    """

    event: str
    message: str
    do: str = ""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Sent by a trainer before it ends; see `TrainerFailed`."""

    reason: str
    hint: str
    fatal: bool


Order = Train | Merge | Evaluate | Save | Describe
FromDaemon = (
    Start
    | Memory
    | Train
    | Merge
    | Evaluate
    | Save
    | Describe
    | Cancel
    | DeltaEncoded
    | ValuesArrived
    | StepAnswered
    | RunEnded
    | Stop
    | DataFromDaemon
    | RecordsGranted
    | EngineFromDaemon
)
FromTrainer = (
    Hello
    | Ready
    | SignOfLife
    | Busy
    | Idle
    | LeaveRequested
    | ValuesEntered
    | StepWanted
    | Trained
    | Merged
    | Evaluated
    | Copied
    | Written
    | Described
    | NotWritten
    | Measurement
    | Warned
    | Failed
    | DataFromTrainer
    | RecordsFromTrainer
    | EngineFromScript
)

_encoder = msgspec.msgpack.Encoder()
_from_daemon: msgspec.msgpack.Decoder[FromDaemon] = msgspec.msgpack.Decoder(FromDaemon)
_from_trainer: msgspec.msgpack.Decoder[FromTrainer] = msgspec.msgpack.Decoder(FromTrainer)


class LinkBroken(TrainingError):
    """The bytes received are not a message."""


def encode(message: FromDaemon | FromTrainer) -> bytes:
    """A message with its frame."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def _bodies(self, data: bytes) -> Iterator[bytes]:
        self._pending += data
        while len(self._pending) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._pending)
            if size > MAX_MESSAGE_BYTES:
                raise LinkBroken(f"a message announces {size} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
            if len(self._pending) < _LENGTH.size + size:
                return
            body = bytes(self._pending[_LENGTH.size : _LENGTH.size + size])
            del self._pending[: _LENGTH.size + size]
            yield body

    def from_daemon(self, data: bytes) -> list[FromDaemon]:
        """The messages completed by `data`. Raises `LinkBroken`."""
        return [_decode(_from_daemon, body) for body in self._bodies(data)]

    def from_trainer(self, data: bytes) -> list[FromTrainer]:
        """The messages completed by `data`. Raises `LinkBroken`."""
        return [_decode(_from_trainer, body) for body in self._bodies(data)]


def _decode(decoder: msgspec.msgpack.Decoder[Message], body: bytes) -> Message:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise LinkBroken(f"a message cannot be decoded: {error}") from error


def trainer_id(node_id: bytes, device: int) -> bytes:
    """What seeds are derived from: the node's id, and another one for each further trainer of the node."""
    return node_id + b"/%d" % device if device else node_id


def derive_node_seed(seed: int, node_id: bytes) -> int:
    """The node's own seed of 63 bits, for data order and dropout: from the swarm's seed and the node's id."""
    return int.from_bytes(hashlib.sha256(b"%d/" % seed + node_id).digest()[:8]) >> 1


def derive_start_seed(seed: int, node_id: bytes, incarnation: int, starts: int) -> int:
    """A seed of 63 bits for one start of a script: another one for each node, each start of the node, and each start of
    the trainer in it, so that no order of batches is repeated."""
    text = b"%d/%d/%d/" % (seed, incarnation, starts) + node_id
    return int.from_bytes(hashlib.sha256(text).digest()[:8]) >> 1
