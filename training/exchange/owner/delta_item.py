"""One shard of a delta on its way into an owner's store. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from training.encoding import codecs
from training.encoding.codecs import CodecName, Vector
from training.shards import robust


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

    @classmethod
    def received(
        cls, shard: int, encoded: bytes | bytearray | memoryview, codec: CodecName, size: int
    ) -> IncomingDelta:
        """Decode and measure a delta of `size` values: two passes, for a thread if they are many."""
        delta = codecs.decoded(encoded, codec, size)
        return cls(shard, delta, encoded, codec, norm=robust.norm_of(delta))
