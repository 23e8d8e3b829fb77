"""Divides the state of a shard into those of its parts, so that each has every delta that the whole has, exactly once.

A delta is cut like the vector, and the rule treats each value by itself. So a part that has the value, the momentum and
the pending deltas of its slice, with the identities and the counts of the whole, goes on bit by bit as the whole would
have (`tests/property/test_splitting_property.py`). Lengths of deltas are the exception: those of a part are not known,
and are estimated as if a delta were spread evenly. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from training.encoding.codecs import Vector
from training.shards.robust import Norms
from training.shards.state import ShardState


def split(state: ShardState, sizes: Sequence[int]) -> list[ShardState]:
    """The states of the parts of a shard, of `sizes` values each, in the order of the vector. Nothing is shared with
    `state`. Raises `ValueError` if the sizes are not those of the whole, and for a shard with named values."""
    if state.table is not None:
        raise ValueError("a shard with named values cannot be divided: a key belongs to one shard by its hash")
    if sum(sizes) != state.value.size or min(sizes) < 1:
        raise ValueError(f"a shard of {state.value.size} values in parts of {list(sizes)}")
    parts, start = [], 0
    for size in sizes:
        parts.append(_part(state, start, start + size))
        start += size
    return parts


def _part(state: ShardState, start: int, stop: int) -> ShardState:
    parameters = min(max(state.parameters - start, 0), stop - start)
    share = math.sqrt((stop - start) / state.value.size)
    # Without parameters there is no momentum, and no round of it.
    momentum = None if state.momentum is None or not parameters else state.momentum[start : start + parameters].copy()

    def cut(values: Vector) -> Vector:
        return values[start:stop].copy()

    return ShardState(
        value=cut(state.value),
        parameters=parameters,
        momentum=momentum,
        sum_weight=state.sum_weight if parameters else 0.0,
        version=state.version,
        era_step=state.era_step,
        era_term=state.era_term,
        applied=state.applied.copy(),
        pending={step: [replace(one, delta=cut(one.delta)) for one in held] for step, held in state.pending.items()},
        folded_step=state.folded_step,
        norms=Norms((node, starts, step, norm * share) for node, starts, step, norm in state.norms.rows()),
        unlisted=state.unlisted,
    )
