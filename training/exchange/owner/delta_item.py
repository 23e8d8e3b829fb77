"""One shard of a delta on its way into an owner's store."""

from __future__ import annotations

from dataclasses import dataclass

from training.encoding.codecs import CodecName, Vector


@dataclass(slots=True)
class IncomingDelta:
    """One shard of a delta, decoded and as it came."""

    shard: int
    delta: Vector
    encoded: bytes | bytearray | memoryview
    codec: CodecName
    #: Out of a split: in time when it was first added, weighed already, and without momentum.
    repair: bool = False
    #: Its length, what it is clipped by, and whether its length is worth a word; found by `DeltaValidator.judge`.
    norm: float = 0.0
    scale: float = 1.0
    unusual: bool = False
