"""One shard of a delta on its way into an owner's store. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from p2pnode.overlay.transport import Buffer
from p2pnode.training.cooperative import VALUES_PER_UPDATE, light
from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.codecs import CodecName, Vector
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
from p2pnode.training.exchange.store.records import BufferedDelta, Owned
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
    #: From the reconciliation of a split: it was in time when first added, is weighed already, and moves no momentum.
    repair: bool = False
    #: Euclidean length; computed by `DeltaValidator` unless it was where the delta was decoded.
    norm: float | None = None
    #: Factor it is clipped by, and whether its length causes a warning; set by `DeltaValidator`.
    scale: float = 1.0
    unusual: bool = False
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

    def buffered(self, identity: DeltaId, weight: float, *, synchronous: bool) -> BufferedDelta:
        """As the store takes it, with the weight of its push."""
        return BufferedDelta(
            identity,
            weight * self.scale,
            self.delta,
            synchronous,
            self.encoded,
            self.codec,
            momentum=not self.repair,
            norm=0.0 if self.repair else self.norm or 0.0,
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
