"""A shard's whole state on the wire: for learners, for hand-over, for take-over from what another node has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from overlay.transport import Buffer
from training.encoding.frames import FrameReader, Part, frames, read_array
from training.exchange.messages import StateHead
from training.shards.applied import Applied, DeltaId
from training.shards.robust import Norms
from training.shards.state import ShardState

if TYPE_CHECKING:
    from training.exchange.store.shard_store import ShardStore


def body(snapshots: list[tuple[StateHead, ShardState]]) -> Iterator[Buffer]:
    """The arrays of the states, in the order that `read_state` expects. Exact: always float32."""
    for head, state in snapshots:
        yield from frames(head.shard, state.value, "float32", Part.VALUE, version=head.version)
        if state.momentum is not None and state.accumulated is not None and state.momentum.size:
            yield from frames(head.shard, state.momentum, "float32", Part.MOMENTUM)
            yield from frames(head.shard, state.accumulated, "float32", Part.ACCUMULATED)
        for item in state.held():
            yield from frames(head.shard, item.delta, "float32", Part.PENDING, step=item.identity.step)


async def read_state(reader: FrameReader, head: StateHead, store: ShardStore) -> ShardState:
    """One state off a body. Raises `BadFrame`, or `ValueError` for a head that does not fit the layout."""
    if not 0 <= head.shard < len(store):
        raise ValueError(f"shard {head.shard} of {len(store)}")
    size = store.size(head.shard)
    value, _, _ = await read_array(reader, head.shard, Part.VALUE, size)
    state = store.fresh_state(head.shard, value)
    if head.has_momentum and state.parameters:
        state.momentum, _, _ = await read_array(reader, head.shard, Part.MOMENTUM, state.parameters)
        state.accumulated, _, _ = await read_array(reader, head.shard, Part.ACCUMULATED, state.parameters)
    state.version, state.sum_weight = head.version, head.sum_weight
    state.era_step, state.era_term, state.folded_step = head.era_step, head.era_term, head.folded_step
    state.applied, state.norms = Applied.of_rows(head.applied), Norms(head.norms)
    for node, incarnation, step, weight, momentum in head.held:
        delta, _, _ = await read_array(reader, head.shard, Part.PENDING, size)
        state.hold(DeltaId(node, incarnation, step), weight, delta, momentum=momentum)
    return state
