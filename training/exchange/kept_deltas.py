"""The encoded deltas of this node that are on their way: a backup finds its own there, and need not be sent them.

The owner of a shard forwards every delta to the backup. Where the backup is the node that the delta came from, it has
the same encoded bytes, until the owner has answered. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from training.encoding.codecs import CodecName
from training.shards.applied import Applied, DeltaId


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
