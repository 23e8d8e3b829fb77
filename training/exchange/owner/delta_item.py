"""One shard of a delta on its way into an owner's store. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from training.encoding.codecs import CodecName, Vector


@dataclass(slots=True)
class IncomingDelta:
    """One shard of a delta, decoded and as it arrived."""

    shard: int
    delta: Vector
    encoded: bytes | bytearray | memoryview
    codec: CodecName
    #: From the reconciliation of a split: it was in time when first added, is weighed already, and moves no momentum.
    repair: bool = False
    #: Euclidean length, factor it is clipped by, and whether its length causes a warning; set by `DeltaValidator`.
    norm: float = 0.0
    scale: float = 1.0
    unusual: bool = False
