"""What daemon and trainer say to each other over the Unix socket, and how a message is framed.

A message is a tagged struct in MessagePack behind its length (u32, big-endian). The trainer connects, the daemon
speaks first (`Start`), and one order is under way at a time. Every order carries a `turn`, which its answer repeats:
the answer to an order the daemon no longer waits for is told apart and dropped. Vectors never pass here; `Memory`
carries the two descriptors of the shared buffers (`training.trainer_link.shared_memory`).

No torch here, and no asyncio: `Decoder` takes bytes as they come, from either side's socket.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from training.errors import TrainingError
from training.trainer_link.interface import Evaluation, StepOrder, StepReport, TrainerHello

#: Where the trainer finds the daemon: the path of the socket, and the daemon's process id.
SOCKET_VARIABLE = "P2PNODE_TRAINER_SOCKET"
DAEMON_VARIABLE = "P2PNODE_DAEMON_PID"

Message = TypeVar("Message")

_LENGTH = struct.Struct(">I")

#: The largest message is the hello: some 100 bytes per tensor, so this is a layout of half a million tensors.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024


class Start(msgspec.Struct, frozen=True, tag="start"):
    """The daemon's first message. `restore` names a file written by an earlier `Save`, or is empty."""

    task: str
    data_dir: str
    options: dict[str, Any]
    device: str
    threads: int
    seed: int
    node_seed: int
    local_steps: int
    restore: str


class Memory(msgspec.Struct, frozen=True, tag="memory"):
    """The shared buffers, `float32[total]` each; their descriptors (vector, delta) travel with the message.

    `initialise` asks the trainer to write its model's own values into the vector.
    """

    total: int
    initialise: bool


class Train(msgspec.Struct, frozen=True, tag="train"):
    turn: int
    order: StepOrder


class Evaluate(msgspec.Struct, frozen=True, tag="evaluate"):
    turn: int
    step: int


class Save(msgspec.Struct, frozen=True, tag="save"):
    turn: int
    path: str


class Export(msgspec.Struct, frozen=True, tag="export"):
    turn: int
    path: str


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Nobody waits for this turn any more: leave it at the next optimiser step, without an answer."""

    turn: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End at the next optimiser step. A user's own loop finds `swarm.done`."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    hello: TrainerHello


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The buffers are mapped, and initialised if that was asked."""


class TrainerProgress(msgspec.Struct, frozen=True, tag="progress"):
    """A sign of life while an order is under way: optimiser steps done in it."""

    optimizer_steps: int


class Trained(msgspec.Struct, frozen=True, tag="trained"):
    turn: int
    report: StepReport


class Evaluated(msgspec.Struct, frozen=True, tag="evaluated"):
    turn: int
    evaluation: Evaluation | None


class Written(msgspec.Struct, frozen=True, tag="written"):
    """The file of a `Save` or `Export` is in place."""

    turn: int


class NotWritten(msgspec.Struct, frozen=True, tag="not_written"):
    """The file could not be written; the trainer itself is well."""

    turn: int
    reason: str
    hint: str


class Warned(msgspec.Struct, frozen=True, tag="warned"):
    """Something the user should know and that stops nothing. `event` is a constant name for the log."""

    event: str
    message: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The trainer's last words before it ends; see `TrainerFailed`."""

    reason: str
    hint: str
    fatal: bool


Order = Train | Evaluate | Save | Export
FromDaemon = Start | Memory | Train | Evaluate | Save | Export | Cancel | Stop
FromTrainer = Hello | Ready | TrainerProgress | Trained | Evaluated | Written | NotWritten | Warned | Failed

_encoder = msgspec.msgpack.Encoder()
_from_daemon: msgspec.msgpack.Decoder[FromDaemon] = msgspec.msgpack.Decoder(FromDaemon)
_from_trainer: msgspec.msgpack.Decoder[FromTrainer] = msgspec.msgpack.Decoder(FromTrainer)


class LinkBroken(TrainingError):
    """What came over the link is no message."""


def encode(message: FromDaemon | FromTrainer) -> bytes:
    """The framed message."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Bytes in, as they come; framed bodies out."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def _bodies(self, data: bytes) -> Iterator[bytes]:
        self._pending += data
        while len(self._pending) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._pending)
            if size > MAX_MESSAGE_BYTES:
                raise LinkBroken(f"a message of {size} bytes is announced; {MAX_MESSAGE_BYTES} is the most")
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
        raise LinkBroken(f"a message cannot be read: {error}") from error


def derive_node_seed(seed: int, node_id: bytes) -> int:
    """The node's own seed, 63 bits, from the swarm's seed and the node's id: data order and dropout follow it."""
    return int.from_bytes(hashlib.sha256(b"%d/" % seed + node_id).digest()[:8]) >> 1
