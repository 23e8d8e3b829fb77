"""Batches: to the table of values of a shard what a delta is to its vector. Pure.

A batch has the updates that an owner has applied together and what came of them: new values, and refusals. Updates are
applied in one order, by the owner alone. Its backup takes the results, so that both have the same values whatever the
reducer is. A batch has an identity like a delta, and travels like one.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from p2pnode.training.errors import TrainingError
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.values.encoding import MAX_KEY_BYTES
from p2pnode.training.values.reducers import Reducer

NodeId = Annotated[bytes, Meta(min_length=20, max_length=20)]
#: A count that a run may reach; what follows the highest still fits.
Number = Annotated[int, Meta(ge=0, lt=1 << 48)]
EncodedKey = Annotated[bytes, Meta(min_length=2, max_length=MAX_KEY_BYTES + 1)]
MAX_TIMESTAMP = 1 << 62
Timestamp = Annotated[int, Meta(ge=-MAX_TIMESTAMP, lt=MAX_TIMESTAMP)]
#: Why an update was refused; cut to this length.
MAX_REASON = 200
Reason = Annotated[str, Meta(max_length=MAX_REASON)]
#: Updates of one batch, and about how many bytes of updates and present values it takes at most.
MAX_UPDATES = 1024
MAX_BATCH_BYTES = 4 * 1024 * 1024


class BadBatch(TrainingError):
    """Bytes that are no batch."""


class KeyUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One update of an encoded key, by an encoded value. `number` counts the updates of its origin to this shard."""

    node: NodeId
    incarnation: Number
    number: Number
    key: EncodedKey
    reducer: Reducer
    update: bytes
    timestamp: Timestamp

    @property
    def identity(self) -> DeltaId:
        """Which update it is: applied once, however often it is sent."""
        return DeltaId(self.node, self.incarnation, self.number)

    @property
    def size_bytes(self) -> int:
        return len(self.key) + len(self.update)


class KeyResult(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A key's new value: `value`, or, where that is None, the update at `place` of the batch."""

    key: EncodedKey
    timestamp: Timestamp
    value: bytes | None = None
    place: Number = 0


class ValueBatch(msgspec.Struct, frozen=True, array_like=True):
    """Updates in the order in which they were applied, the values that they led to, and which were refused and why.

    `order` is above that of every batch before it: of two values of a key the one of the higher order is the newer.
    """

    order: Number
    updates: Annotated[list[KeyUpdate], Meta(max_length=MAX_UPDATES)]
    results: Annotated[list[KeyResult], Meta(max_length=MAX_UPDATES)]
    refused: Annotated[list[tuple[Number, Reason]], Meta(max_length=MAX_UPDATES)] = []

    def value_of(self, result: KeyResult) -> bytes:
        """The encoded value of a result."""
        return self.updates[result.place].update if result.value is None else result.value


def encode_batch(batch: ValueBatch) -> bytes:
    return msgspec.msgpack.encode(batch)


def decode_batch(raw: Any) -> ValueBatch:
    """The batch of `encode_batch`. Raises `BadBatch`."""
    try:
        batch = msgspec.msgpack.decode(raw, type=ValueBatch)
    except msgspec.DecodeError as error:
        raise BadBatch(f"no batch of values: {error}") from error
    count = len(batch.updates)
    for one in batch.results:
        if one.place >= count and one.value is None:
            raise BadBatch("a batch names an update that it does not have")
    for place, _ in batch.refused:
        if place >= count:
            raise BadBatch("a batch refuses an update that it does not have")
    return batch
