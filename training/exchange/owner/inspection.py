"""Looks for values of this node's shards that are not finite, or out of range.

No delta that is accepted makes them so (`training.exchange.owner.validation`). Memory, a driver or a kernel may. One
pass over the values finds it: at most once a second for each shard, and no faster than `BYTES_PER_S`. A shard that is
served is looked at before, if it was not within that second, so that hardly anybody is sent such values. The addition
of a delta is such a pass too (`ShardState.note_addition`): a shard that trains is not read once more.

A broken shard that this node owns is held until it is repaired (`training.exchange.recovery.shard_repair`). A broken
copy of a backup is dropped: its owner hears of it with the next forward, and sends the state again.
"""

from __future__ import annotations

from collections.abc import Iterable

from training.exchange.context import ExchangeContext
from training.exchange.cooperative import LoopYielder, off_loop
from training.shards.delta_range import MAX_STATE_LENGTH, has_length
from training.shards.state import ShardState

INTERVAL_S = 1.0
#: A tenth of what one core reads; at four bytes a value.
BYTES_PER_S = 512 * 1024 * 1024


class ShardInspector:
    """The inspections of one node."""

    def __init__(self, context: ExchangeContext) -> None:
        self._store = context.store
        self._rebalance = context.rebalance
        self._clock = context.environment.clock
        self._executor = context.environment.executor
        self._log = context.environment.log

    def due(self) -> list[int]:
        """The shards of this node whose turn has come."""
        shards = [*self._store.owned, *self._store.backed]
        whole_bytes = sum(4 * self._store.size(shard) for shard in shards)
        return [shard for shard in shards if self._is_due(shard, max(INTERVAL_S, whole_bytes / BYTES_PER_S))]

    def _is_due(self, shard: int, interval_s: float) -> bool:
        state = self._state(shard)
        if state is None or not state.value.size:
            return False
        return self._clock.monotonic() - state.looked_s >= interval_s

    def _state(self, shard: int) -> ShardState | None:
        if (owned := self._store.owned.get(shard)) is not None:
            return None if owned.is_broken else owned.state
        backed = self._store.backed.get(shard)
        return None if backed is None else backed.state

    async def inspect(self, shards: Iterable[int]) -> None:
        """Look at those of the shards that were not looked at within `INTERVAL_S`."""
        turn = LoopYielder()
        for shard in shards:
            state = self._state(shard)
            if state is None or not self._is_due(shard, INTERVAL_S):
                continue
            state.looked_s = self._clock.monotonic()
            size = state.value.size
            if not await off_loop(self._executor, size, _is_good, state) and self._state(shard) is state:
                self.found(shard)
            await turn.after(size)

    def found(self, shard: int) -> None:
        """A shard of this node is broken."""
        if (owned := self._store.owned.get(shard)) is not None:
            owned.is_broken = True
        elif shard in self._store.backed:
            self._store.drop_broken_backup(shard)
        else:
            return
        self._log.error("shard_broken", shard=shard, role="backup" if owned is None else "owner")
        self._rebalance.wake()


def _is_good(state: ShardState) -> bool:
    arrays = (state.value, state.momentum)
    return all(array is None or has_length(array, MAX_STATE_LENGTH) for array in arrays)
