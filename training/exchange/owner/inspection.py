"""Looks for values of this node's shards that are not finite, or out of range.

No delta that is accepted makes them so (`training.exchange.owner.validation`). Memory, a driver or a kernel may. One
pass over the values finds it: at most once a second for each shard, and no faster than `BYTES_PER_S`. A shard that is
served is looked at before, if it was not within that second, so that hardly anybody is sent such values. The addition
of a delta is such a pass too (`ShardState.note_addition`): a shard that trains is not read once more.

A broken shard that this node owns is held until it is repaired (`training.exchange.recovery.shard_repair`). A broken
copy of a backup is dropped: its owner hears of it with the next forward, and sends the state again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from training.exchange.context import ExchangeContext
from training.exchange.cooperative import LoopYielder, off_loop
from training.shards.delta_range import MAX_STATE_LENGTH, has_length
from training.shards.state import ShardState

INTERVAL_S = 1.0
#: A tenth of what one core reads; at four bytes a value.
BYTES_PER_S = 512 * 1024 * 1024
#: A thread looks at so many values, or one shard: the way to it and back costs as much as this pass.
VALUES_AT_ONCE = 1 << 20


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
        states = [(shard, owned.state) for shard, owned in self._store.owned.items() if not owned.is_broken]
        states += [(shard, backed.state) for shard, backed in self._store.backed.items() if backed.state is not None]
        whole_bytes = sum(4 * state.value.size for _, state in states)
        before_s = self._clock.monotonic() - max(INTERVAL_S, whole_bytes / BYTES_PER_S)
        return [shard for shard, state in states if state.looked_s <= before_s and state.value.size]

    def _state(self, shard: int) -> ShardState | None:
        if (owned := self._store.owned.get(shard)) is not None:
            return None if owned.is_broken else owned.state
        backed = self._store.backed.get(shard)
        return None if backed is None else backed.state

    async def inspect(self, shards: Iterable[int]) -> None:
        """Look at those of the shards that were not looked at within `INTERVAL_S`."""
        turn, left = LoopYielder(), list(shards)
        while left:
            some: dict[int, ShardState] = {}
            size, now_s = 0, self._clock.monotonic()
            while left and size < VALUES_AT_ONCE:
                state = self._state(shard := left.pop(0))
                if state is not None and state.value.size and now_s - state.looked_s >= INTERVAL_S:
                    state.looked_s, some[shard] = now_s, state
                    size += state.value.size
            for shard in await off_loop(self._executor, size, _broken, some):
                if self._state(shard) is some[shard]:
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


def _broken(states: Mapping[int, ShardState]) -> list[int]:
    return [shard for shard, state in states.items() if not _is_good(state)]


def _is_good(state: ShardState) -> bool:
    arrays = (state.value, state.momentum)
    return all(array is None or has_length(array, MAX_STATE_LENGTH) for array in arrays)
