"""What one node counts of its exchange."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Bytes, refusals and losses since the start, for `/status` and `/metrics`."""

    bytes_sent: int = 0
    bytes_received: int = 0
    merged: int = 0  # shards of deltas added here as owner
    refused: int = 0  # this node's deltas, by owners
    refused_here: dict[str, int] = field(default_factory=dict)  # others' deltas, by this node, by reason
    unusual_norms: int = 0  # shards of deltas with a norm far above the median
    clipped: int = 0  # shards of deltas that were scaled down
    repaired: int = 0  # deltas of one shard from the other side of a split, added here
    followed: int = 0  # shards brought up to date by changes of their published value
    publications_entered: int = 0  # shards of which the published value was pulled as a whole
    publication_mismatches: int = 0  # shards with another digest after a pull than at their owner; pulled whole
    lost_in_splits: int = 0  # acknowledged on this side of a split, and no longer in the log
    resigned_shards: int = 0  # of this node whose values were not finite, or out of range
    lost_in_restarts: int = 0  # what disks had, and the copies that the swarm was started again with had not
    sent_again: int = 0  # shards of deltas that an owner acknowledged and lost
