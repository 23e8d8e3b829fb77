"""The delta of one step on its way to the owners: its encoded shards, and what was answered for them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from training.encoding.codecs import CodecName
from training.encoding.frames import framed_bytes
from training.exchange.messages import Push
from training.exchange.owner.delta_item import IncomingDelta
from training.exchange.step_wait import StepWait
from training.shards.applied import DeltaId


@dataclass(slots=True)
class Outgoing:
    """One encoded shard of a delta, and the number of values it decodes to.

    `is_borrowed`: it is the trainer's memory, which is valid only while the step waits for its answers.
    """

    shard: int
    encoded: bytes | bytearray | memoryview
    codec: CodecName
    values: int
    is_borrowed: bool = False
    #: Whether it may have been sent: then its owner may have it, under this identity.
    is_started: bool = False

    @property
    def framed_bytes(self) -> int:
        return framed_bytes(self.codec, self.values, len(self.encoded))

    def item(self) -> IncomingDelta:
        """The same shard as its owner receives it; it refers to no memory of the trainer."""
        encoded = bytes(self.encoded) if self.is_borrowed else self.encoded
        return IncomingDelta.received(self.shard, encoded, self.codec, self.values)


@dataclass(slots=True)
class Delivery:
    """The delta of one step: its unacknowledged shards, and the answers for the others."""

    push: Push
    unacknowledged: dict[int, Outgoing]
    done: asyncio.Event
    acknowledged: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    refused_shards: set[int] = field(default_factory=set)
    #: What the step that made it waits for; None when it waits for nothing.
    wait: StepWait | None = None
    #: Cancelled in order to continue from a copy of the trainer's memory.
    interrupted: bool = False
    task: asyncio.Task[None] | None = None
    #: Monotonic seconds; set when it is put into the outbox.
    since: float = 0.0

    @property
    def identity(self) -> DeltaId:
        return DeltaId(self.push.node, self.push.incarnation, self.push.step)

    @property
    def size_bytes(self) -> int:
        return sum(len(item.encoded) for item in self.unacknowledged.values())
