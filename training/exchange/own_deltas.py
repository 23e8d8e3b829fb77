"""What this node has sent: its deltas on their way to the owners, and what the owners have acknowledged.

The owner of a shard forwards every delta to the backup. Where the backup is the node that the delta came from, it has
the same encoded bytes until the owner has answered, and need not be sent them (`SentDeltas.find`).

An owner may lose what it has acknowledged. The only node that may own shards has no backup: started again, it goes on
with what was on its disk. Where owner and backup die at once, the shard goes on from what others have pulled. The owner
that is there afterwards is sent what it lacks, under the same identity (`training.exchange.recovery.resending`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from p2pnode.training.encoding.codecs import CodecName
from p2pnode.training.encoding.frames import framed_bytes
from p2pnode.training.exchange.messages import Push
from p2pnode.training.exchange.owner.delta_item import IncomingDelta
from p2pnode.training.exchange.step_wait import StepWait
from p2pnode.training.shards.applied import DeltaId

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
class Delivery:
    """The delta of one step: its unacknowledged shards, and the answers for the others."""

    push: Push
    unacknowledged: dict[int, Outgoing]
    done: asyncio.Event
    acknowledged: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    refused_shards: set[int] = field(default_factory=set)
    #: The version of the owner's state of each acknowledged shard that has the delta.
    versions: dict[int, int] = field(default_factory=dict)
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
    """The record of one node."""

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
