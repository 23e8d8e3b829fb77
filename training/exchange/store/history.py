"""What the identities in stored states show: a node's last incarnation and step. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from training.shards.applied import Applied

#: A state directory that was restored from an old copy has missed at most so many starts.
MAX_STARTS_AHEAD = 1 << 20


def highest_step_of(node: bytes, known: Iterable[Applied], *, starts: int, steps: int) -> tuple[int, int]:
    """The highest incarnation and the highest step of a node's deltas; (0, 0) where there are none.

    Identities of its starts beyond `starts` and `MAX_STARTS_AHEAD` more, or of steps beyond `steps`, are not its own:
    whoever has forged them must not take its numbers from it.
    """
    incarnation = step = 0
    for one in known:
        if (floor := one.forgotten.floors.get(node)) is not None and floor.incarnation <= starts + MAX_STARTS_AHEAD:
            incarnation, step = max(incarnation, floor.incarnation - 1), max(step, min(floor.step - 1, steps))
        for origin, number, ranges in one.rows():
            if origin == node and ranges and number <= starts + MAX_STARTS_AHEAD:
                past = max((min(high, steps) for low, high in ranges if low <= steps), default=0)
                incarnation, step = max(incarnation, number), max(step, past)
    return incarnation, step
