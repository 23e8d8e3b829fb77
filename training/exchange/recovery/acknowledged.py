"""This node's deltas that other nodes have acknowledged, for as long as they may have to be sent again. Pure.

The only node that may own shards has no backup. Started again, it goes on with what was on its disk. Where owner and
backup die at once, the shard goes on from what others have pulled. The owner that is there afterwards is sent what it
lacks, under the same identity. Each delta is kept `KEPT_S`, and as long as its owner is gone; all of them within
`KEPT_BYTES` of encoded values: the oldest are dropped first. One that is too large is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from training.encoding.codecs import CodecName
from training.exchange.messages import Push
from training.shards.applied import DeltaId

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

    def in_doubt(self, shard: int) -> bool:
        """Whether an owner is to be asked about deltas of a shard."""
        return b"" in self._owners.get(shard, {})

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
