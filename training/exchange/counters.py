"""Counters of the exchange since the start, for `/status` and `/metrics`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """What went over the wire and what was turned away, since the start."""

    bytes_sent: int = 0
    bytes_received: int = 0
    refused: int = 0  # our deltas, by owners
    refused_here: dict[str, int] = field(default_factory=dict)  # others' deltas, by us, by reason
    unusual_norms: int = 0  # shards of deltas that were far longer than the median
    clipped: int = 0  # shards of deltas that were shortened
    lost: int = 0  # our deltas dropped from a full outbox
    repaired: int = 0  # deltas of one shard that another side of a split had, added here
    lost_in_splits: int = 0  # of one shard, acknowledged on our side of a split, and out of the log's reach
