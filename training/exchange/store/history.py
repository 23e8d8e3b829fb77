"""What the identities in stored states show: deltas that only some shards have, and a node's last step. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from training.exchange.store.repair_log import Span
from training.shards.applied import Applied

#: Spans of lost deltas listed in one event; the others are counted.
NAMED = 32


def incomplete_deltas(known: Sequence[Applied]) -> list[Span]:
    """The last deltas of each origin that some shards have and others lack, once per shard that lacks them.

    This is what a killed swarm has lost, as far as its disks show; a delta that is on no disk leaves no trace.
    """
    latest: dict[tuple[bytes, int], int] = {}
    for one in known:
        for node, incarnation, ranges in one.rows():
            latest[node, incarnation] = max(latest.get((node, incarnation), 0), ranges[-1][1])
    return [
        (node, incarnation, ranges[-1][1] + 1, latest[node, incarnation])
        for one in known
        for node, incarnation, ranges in one.rows()
        if ranges[-1][1] < latest[node, incarnation]
    ]


def highest_step_of(node: bytes, known: Iterable[Applied]) -> tuple[int, int]:
    """The highest incarnation and the highest step of a node's deltas; (0, 0) where there are none."""
    incarnation = step = 0
    for one in known:
        for origin, number, ranges in one.rows():
            if origin == node and ranges:
                incarnation, step = max(incarnation, number), max(step, ranges[-1][1])
    return incarnation, step
