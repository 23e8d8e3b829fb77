"""The deltas of this node: on their way to the owners, and acknowledged for as long as they may have to be sent again.

The owner of a shard forwards every delta to the backup. Where the backup is the node that the delta came from, it has
the same encoded bytes until the owner has answered (`KeptDeltas`), and need not be sent them.

The only node that may own shards has no backup. Started again, it goes on with what was on its disk. Where owner and
backup die at once, the shard goes on from what others have pulled. The owner that is there afterwards is sent what it
lacks, under the same identity (`AcknowledgedDeltas`). Each delta is kept `KEPT_S`, and as long as its owner is gone;
all of them within `KEPT_BYTES` of encoded values: the oldest are dropped first. One that is too large is not kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from training.encoding.codecs import CodecName
from training.encoding.frames import framed_bytes
from training.exchange.messages import Push
from training.exchange.owner.delta_item import IncomingDelta
from training.exchange.step_wait import StepWait
from training.shards.applied import Applied, DeltaId


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


class KeptDelta(Protocol):
    """One encoded shard of a delta."""

    @property
    def encoded(self) -> bytes | bytearray | memoryview: ...
    @property
    def codec(self) -> CodecName: ...
    @property
    def is_borrowed(self) -> bool:
        """Whether `encoded` is memory that will be written to again: what is kept of it must be a copy."""
        ...


class KeptDeltas:
    """The deltas of one node that not all owners have acknowledged."""

    def __init__(self) -> None:
        self._kept: dict[DeltaId, Mapping[int, KeptDelta]] = {}

    def keep(self, identity: DeltaId, shards: Mapping[int, KeptDelta]) -> None:
        """Offer these shards, as the mapping has them at each moment."""
        self._kept[identity] = shards

    def drop(self, identity: DeltaId) -> None:
        """The delta is no longer on its way."""
        self._kept.pop(identity, None)

    def identities(self) -> Applied:
        """The identities of those that are on their way."""
        found = Applied()
        for identity in self._kept:
            found.add(identity)
        return found

    def find(self, identity: DeltaId, shard: int) -> tuple[bytes | bytearray | memoryview, CodecName] | None:
        """The encoded shard and its codec, as it was sent to the owner; None if it is not kept."""
        item = self._kept.get(identity, {}).get(shard)
        if item is None:
            return None
        return (bytes(item.encoded) if item.is_borrowed else item.encoded), item.codec


KEPT_S = 300.0
KEPT_BYTES = 16 << 20
#: One above this share of the bytes would drive out too many others.
LARGEST_SHARE = 1 / 8
#: Some 300 bytes each, beside their values; more where there is more room for these.
MAX_KEPT, ROOM_EACH = 8192, 1 << 12

Encoded = bytes | bytearray | memoryview


class AcknowledgedKey(NamedTuple):
    """One shard of a delta."""

    shard: int
    identity: DeltaId


@dataclass(slots=True)
class Acknowledged:
    """One shard of a delta of this node: who acknowledged it, and when."""

    push: Push
    owner: bytes
    at_s: float
    codec: CodecName
    values: int
    encoded: Encoded

    @property
    def size_bytes(self) -> int:
        return len(self.encoded)


class AcknowledgedDeltas:
    """The acknowledged deltas of one node, the oldest first. `limit_bytes` may change."""

    def __init__(self, limit_bytes: int = KEPT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._kept: dict[AcknowledgedKey, Acknowledged] = {}
        #: How many of them each owner has acknowledged, by shard.
        self._owners: dict[int, dict[bytes, int]] = {}
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[tuple[AcknowledgedKey, Acknowledged]]:
        return iter(list(self._kept.items()))

    def note(self, shard: int, delta: Acknowledged) -> None:
        """An owner has acknowledged one shard of a delta."""
        push = delta.push
        key = AcknowledgedKey(shard, DeltaId(push.node, push.incarnation, push.step))
        self.drop(key)
        if delta.size_bytes > LARGEST_SHARE * self.limit_bytes:
            return
        self._kept[key] = delta
        self._count(shard, delta.owner)
        self.size_bytes += delta.size_bytes
        most = max(MAX_KEPT, self.limit_bytes // ROOM_EACH)
        while len(self._kept) > most or self.size_bytes > self.limit_bytes:
            self.drop(next(iter(self._kept)))

    def find(self, key: AcknowledgedKey) -> Acknowledged | None:
        return self._kept.get(key)

    def drop(self, key: AcknowledgedKey) -> None:
        """Nothing more is to be done about it."""
        if (found := self._kept.pop(key, None)) is not None:
            self.size_bytes -= found.size_bytes
            self._discount(key.shard, found.owner)

    def owners(self) -> Iterator[tuple[int, Collection[bytes]]]:
        """By shard, who has acknowledged those that are kept: one owner, as a rule."""
        return ((shard, owners.keys()) for shard, owners in self._owners.items())

    def moved(self, key: AcknowledgedKey, owner: bytes) -> None:
        """Another owner of its shard has it now."""
        if (found := self._kept.get(key)) is not None:
            self._discount(key.shard, found.owner)
            self._count(key.shard, owner)
            found.owner = owner

    def doubt(self, owner: bytes) -> None:
        """An owner was started again, or is back after it was gone: it may have less than it has acknowledged."""
        for key, delta in self:
            if delta.owner == owner:
                self.moved(key, b"")

    def _count(self, shard: int, owner: bytes) -> None:
        owners = self._owners.setdefault(shard, {})
        owners[owner] = owners.get(owner, 0) + 1

    def _discount(self, shard: int, owner: bytes) -> None:
        owners = self._owners[shard]
        owners[owner] -= 1
        if not owners[owner]:
            del owners[owner]
            if not owners:
                del self._owners[shard]

    def drop_old(self, now_s: float, is_gone: Callable[[bytes], bool]) -> None:
        """Drop what was acknowledged long ago, unless its owner is gone: that one may start again."""
        old: list[AcknowledgedKey] = []
        gone: dict[bytes, bool] = {b"": True}
        for key, delta in self._kept.items():
            if now_s - delta.at_s <= KEPT_S:
                break
            if delta.owner not in gone:
                gone[delta.owner] = is_gone(delta.owner)
            if not gone[delta.owner]:
                old.append(key)
        for key in old:
            self.drop(key)
