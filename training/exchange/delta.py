"""A shard of a delta as its origin sends it (`Outgoing`) and its owner adds it (`IncomingDelta`); what a node has sent.

The owner of a shard forwards every delta to the backup. Where the backup is the node that the delta came from, it has
the same encoded bytes until the owner has answered, and need not be sent them (`SentDeltas.find`).

An owner may lose what it has acknowledged. The only node that may own shards has no backup: started again, it goes on
with what was on its disk. Where owner and backup die at once, the shard goes on from what others have pulled. The owner
that is there afterwards is sent what it lacks, under the same identity (`training.exchange.recovery.resending`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from p2pnode.overlay.transport import Buffer
from p2pnode.training.cooperative import VALUES_PER_UPDATE, light
from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.encoding.frames import (
    BadFrame,
    FrameReader,
    Part,
    blob_framed_bytes,
    blob_frames,
    encoded_frames,
    framed_bytes,
    read_array,
    read_blob,
)
from p2pnode.training.encoding.table import CodecName
from p2pnode.training.exchange.messages import Push
from p2pnode.training.exchange.store.records import BufferedDelta, Owned
from p2pnode.training.exchange.timeouts import StepWait
from p2pnode.training.shards import robust
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.value_batch import MAX_BATCH_BYTES, BadBatch, ValueBatch, decode_batch

#: Bytes of an encoded batch: updates and results, each of which may be as large as one value more than the limit.
MAX_ENCODED_BATCH_BYTES = 4 * MAX_BATCH_BYTES


@dataclass(slots=True)
class IncomingDelta:
    """One shard of a delta, decoded and as it arrived."""

    shard: int
    delta: Vector
    encoded: bytes | bytearray | memoryview
    codec: CodecName
    #: An owner adds it at any age and without momentum. It was acknowledged before, by this side of a split, the other
    #: side, or an owner that lost it; or it was trained while no owner was in reach (`Push.apart`).
    repair: bool = False
    #: Euclidean length; computed by `DeltaValidator` unless it was where the delta was decoded.
    norm: float | None = None
    #: Factor it is clipped by, and whether its length causes a warning; set by `DeltaValidator`.
    scale: float = 1.0
    unusual: bool = False
    #: A repair is added without, unless a target may have it with momentum from an earlier attempt; set by
    #: `DeltaReplicator`.
    momentum: bool = True
    #: In a run without a model: the batch of named values, the number of its identity in this shard, and the ownership
    #: under which it was computed. Under another one its results are void.
    batch: ValueBatch | None = None
    number: int = 0
    basis: Owned | None = None

    @classmethod
    def received(
        cls, shard: int, encoded: bytes | bytearray | memoryview, codec: CodecName, size: int
    ) -> IncomingDelta:
        """Decode and measure a delta of `size` values: two passes, for a thread if they are many."""
        delta = codecs.decoded(encoded, codec, size)
        return cls(shard, delta, encoded, codec, norm=robust.norm_of(delta))

    @classmethod
    def of_batch(
        cls, shard: int, encoded: bytes | memoryview, batch: ValueBatch, number: int = 0, basis: Owned | None = None
    ) -> IncomingDelta:
        """A batch of named values in place of a delta."""
        return cls(shard, NO_VALUES, encoded, "float32", norm=0.0, batch=batch, number=number, basis=basis)

    def identity(self, of_push: DeltaId) -> DeltaId:
        """Its identity, in a push or forward of this one."""
        return DeltaId(of_push.node, of_push.incarnation, self.number) if self.number else of_push

    def buffered(self, identity: DeltaId, weight: float) -> BufferedDelta:
        """As the store takes it, with the weight of its push."""
        return BufferedDelta(
            identity,
            weight * self.scale,
            self.delta,
            self.encoded,
            self.codec,
            momentum=self.momentum,
            norm=(self.norm or 0.0) if self.momentum else 0.0,
            batch=self.batch,
        )

    @property
    def work(self) -> int:
        """What adding it takes, in values (`LoopYielder`)."""
        return light(self.delta.size) if self.batch is None else VALUES_PER_UPDATE * len(self.batch.updates)

    def frames(self, step: int) -> Iterator[Buffer]:
        """As it is forwarded."""
        return logged_frames(self.shard, self.encoded, self.codec, step, is_batch=self.batch is not None)

    @property
    def framed_bytes(self) -> int:
        """Bytes on the wire."""
        if self.batch is not None:
            return blob_framed_bytes(len(self.encoded))
        return framed_bytes(self.codec, self.delta.size, len(self.encoded))


#: The delta of a shard without values.
NO_VALUES = np.zeros(0, np.float32)


def logged_frames(
    shard: int, payload: bytes | bytearray | memoryview, codec: CodecName, step: int, *, is_batch: bool
) -> Iterator[Buffer]:
    """A delta or a batch as it was received, or is in the repair log."""
    if is_batch:
        return blob_frames(shard, payload, Part.BATCH)
    return encoded_frames(shard, payload, codec, Part.DELTA, step=step)


async def read_item(reader: FrameReader, shard: int, size: int, *, repair: bool = False) -> IncomingDelta:
    """Read what `logged_frames` sends: a delta of `size` values, or, where a shard has none, a batch. Raises
    `BadFrame`."""
    if size:
        delta, encoded, codec = await read_array(reader, shard, Part.DELTA, size)
        return IncomingDelta(shard, delta, encoded, codec, repair=repair)
    raw, _ = await read_blob(reader, shard, Part.BATCH, MAX_ENCODED_BATCH_BYTES)
    return logged_item(shard, raw, "float32", size, repair=repair)


def logged_item(
    shard: int, payload: bytes | bytearray | memoryview, codec: CodecName, size: int, *, repair: bool = False
) -> IncomingDelta:
    """A delta or a batch of the repair log. Raises `BadFrame`."""
    if size:
        delta = np.empty(size, dtype=np.float32)
        codecs.decode(payload, codec, delta)
        return IncomingDelta(shard, delta, payload, codec, repair=repair)
    try:
        item = IncomingDelta.of_batch(shard, memoryview(payload), decode_batch(payload))
    except BadBatch as error:
        raise BadFrame(f"shard {shard}: {error}") from error
    item.repair = repair
    return item


Encoded = bytes | bytearray | memoryview

#: Most bytes of acknowledged deltas; the oldest are dropped first. One above the share would drive out too many others.
KEPT_BYTES = 16 << 20
LARGEST_SHARE = 1 / 8
#: Memory of one beside its values.
ENTRY_BYTES = 300


@dataclass(slots=True)
class Outgoing:
    """One encoded shard of a delta, and the number of values it decodes to.

    `is_borrowed`: it is the trainer's memory, which is valid only while the step waits for its answers.
    """

    shard: int
    encoded: Encoded
    codec: CodecName
    values: int
    is_borrowed: bool = False
    #: Whether it may have been sent: then its owner may have it, under this identity.
    is_started: bool = False

    @property
    def framed_bytes(self) -> int:
        return framed_bytes(self.codec, self.values, len(self.encoded))

    def own(self) -> Outgoing:
        """The same shard, which refers to no memory of the trainer."""
        return replace(self, encoded=bytes(self.encoded), is_borrowed=False) if self.is_borrowed else self

    def item(self) -> IncomingDelta:
        """The same shard as its owner receives it."""
        return IncomingDelta.received(self.shard, self.own().encoded, self.codec, self.values)


@dataclass(slots=True)
class PushReport:
    """How a push went: shards acknowledged, refused (by reason), and still in the outbox. The first three grow when one
    of these is answered later. `versions`: of a shard that was acknowledged in time the version of the owner's state
    that has the delta. `returned`: shards of which no byte was sent, and none will be."""

    acknowledged: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    refused_shards: set[int] = field(default_factory=set)
    versions: dict[int, int] = field(default_factory=dict)
    outstanding: int = 0
    bytes_sent: int = 0
    returned: tuple[int, ...] = ()


@dataclass(slots=True)
class Delivery:
    """The delta of one step: its unacknowledged shards, and the answers for the others."""

    push: Push
    unacknowledged: dict[int, Outgoing]
    done: asyncio.Event
    report: PushReport = field(default_factory=PushReport)
    #: What the step that made it waits for; None when it waits for nothing.
    wait: StepWait | None = None
    task: asyncio.Task[None] | None = None
    #: Monotonic seconds; set when it is put into the outbox.
    since: float = 0.0

    @property
    def identity(self) -> DeltaId:
        return DeltaId(self.push.node, self.push.incarnation, self.push.step)


class AcknowledgedKey(NamedTuple):
    """One shard of a delta."""

    shard: int
    identity: DeltaId


@dataclass(slots=True)
class Acknowledged:
    """One shard of a delta of this node, and the owner that has acknowledged it; empty: it may have lost it."""

    push: Push
    owner: bytes
    item: Outgoing

    @property
    def size_bytes(self) -> int:
        return len(self.item.encoded) + ENTRY_BYTES


class SentDeltas:
    """What one node has sent to owners: deltas on their way, and acknowledged ones, in case an owner loses them."""

    def __init__(self) -> None:
        #: On their way, by step.
        self.deliveries: dict[int, Delivery] = {}
        #: The oldest first.
        self.acknowledged: dict[AcknowledgedKey, Acknowledged] = {}
        self.size_bytes = 0
        self._owners: Counter[tuple[int, bytes]] = Counter()

    def find(self, identity: DeltaId, shard: int) -> Outgoing | None:
        """A shard of a delta on its way, as it was sent to the owner; None if that has answered."""
        delivery = self.deliveries.get(identity.step)
        if delivery is None or delivery.identity != identity or shard not in delivery.unacknowledged:
            return None
        return delivery.unacknowledged[shard].own()

    def acknowledge(self, push: Push, owner: bytes, item: Outgoing, limit_bytes: int = KEPT_BYTES) -> None:
        """An owner has acknowledged one shard of a delta."""
        key = AcknowledgedKey(item.shard, DeltaId(push.node, push.incarnation, push.step))
        self.drop(key)
        one = Acknowledged(push, owner, item)
        if one.size_bytes > LARGEST_SHARE * limit_bytes:
            return
        self.acknowledged[key] = one
        self._owners[item.shard, owner] += 1
        self.size_bytes += one.size_bytes
        while self.size_bytes > limit_bytes:
            self.drop(next(iter(self.acknowledged)))

    def drop(self, key: AcknowledgedKey) -> None:
        """Nothing more is to be done about an acknowledged shard."""
        if (found := self.acknowledged.pop(key, None)) is not None:
            self.size_bytes -= found.size_bytes
            self._discount(key.shard, found.owner)

    def moved(self, key: AcknowledgedKey, owner: bytes) -> None:
        """Another owner of its shard has it now."""
        if (found := self.acknowledged.get(key)) is not None:
            self._discount(key.shard, found.owner)
            self._owners[key.shard, owner] += 1
            found.owner = owner

    def unconfirm(self, owner: bytes) -> None:
        """An owner was started again, or is back after it was gone: it may have less than it has acknowledged."""
        for key, one in self.acknowledged.items():
            if one.owner == owner:
                self.moved(key, b"")

    def owners(self) -> Collection[tuple[int, bytes]]:
        """By shard, who has acknowledged deltas of it. There are a few hundred, and many thousand deltas."""
        return self._owners.keys()

    def _discount(self, shard: int, owner: bytes) -> None:
        self._owners[shard, owner] -= 1
        if not self._owners[shard, owner]:
            del self._owners[shard, owner]
