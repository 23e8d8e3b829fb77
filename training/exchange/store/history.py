"""What the identities in stored states show: a node's last incarnation and step. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from training.shards.applied import Applied


def highest_step_of(node: bytes, known: Iterable[Applied]) -> tuple[int, int]:
    """The highest incarnation and the highest step of a node's deltas; (0, 0) where there are none."""
    incarnation = step = 0
    for one in known:
        for origin, number, ranges in one.rows():
            if origin == node and ranges:
                incarnation, step = max(incarnation, number), max(step, ranges[-1][1])
    return incarnation, step
