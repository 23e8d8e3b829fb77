"""Copies the state of a shard in a thread, while the event loop may add deltas to it."""

from __future__ import annotations

from overlay.environment import Executor
from training.shards.state import ShardState

#: After so many copies that a delta spoilt, the next one is made on the loop.
ATTEMPTS = 3


async def copied(state: ShardState, executor: Executor) -> ShardState:
    """An independent copy: begun again if a delta was added while the arrays were copied."""
    for _ in range(ATTEMPTS):
        copy = state.unfilled_copy()
        await executor.run(copy.fill_from, state)
        if copy.is_copy_of(state):
            return copy
    return state.copy()
