"""Finds values of this node's shards that are not finite, or out of range, before they are served.

No delta that is accepted makes them so (`training.exchange.owner.validation`). Memory, a driver or a kernel may. A
shard that is served is looked at, if that was not done within `INTERVAL_S`. The addition of a delta is such a look too
(`ShardState.note_addition`): a shard that trains is not read once more.

A node resigns a broken shard, as if it had crashed: it drops the state, and the backup takes over. A backup drops a
broken copy, and its owner sends the state again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from training.exchange.context import ExchangeContext
from training.exchange.cooperative import LoopYielder, off_loop
from training.shards.state import ShardState

INTERVAL_S = 1.0
#: A thread looks at so many values, or one shard: the way to it and back costs as much as this pass.
VALUES_AT_ONCE = 1 << 20


class ShardInspector:
    """The inspections of one node."""

    def __init__(self, context: ExchangeContext) -> None:
        self._store = context.store
        self._counters = context.counters
        self._rebalance = context.rebalance
        self._clock = context.environment.clock
        self._executor = context.environment.executor
        self._log = context.environment.log

    async def inspect(self, shards: Iterable[int]) -> None:
        """Look at those of the shards owned here that were not looked at within `INTERVAL_S`."""
        turn, left = LoopYielder(), list(shards)
        while left:
            some: dict[int, ShardState] = {}
            size, now_s = 0, self._clock.monotonic()
            while left and size < VALUES_AT_ONCE:
                owned = self._store.owned.get(shard := left.pop(0))
                if owned is not None and owned.state.value.size and now_s - owned.state.looked_s >= INTERVAL_S:
                    owned.state.looked_s, some[shard] = now_s, owned.state
                    size += owned.state.value.size
            for shard in await off_loop(self._executor, size, _broken, some):
                if (owned := self._store.owned.get(shard)) is not None and owned.state is some[shard]:
                    self.resign(shard)
            await turn.after(size)

    def resign(self, shard: int) -> None:
        """Own a shard no more, whose values are broken."""
        self._store.resign(shard)
        self._counters.resigned_shards += 1
        self._log.error("shard_resigned", shard=shard)
        self._rebalance.take_over(shard)  # the ordinary search for the best copy, here without one
        self._rebalance.wake()


def is_good(state: ShardState, now_s: float) -> bool:
    """Whether the values of a backup's copy, to which a delta may have been added now, are in range: they are looked at
    once in `INTERVAL_S`, unless the addition was such a look."""
    state.note_addition(now_s)
    if now_s - state.looked_s < INTERVAL_S:
        return True
    state.looked_s = now_s
    return state.is_in_range()


def _broken(states: Mapping[int, ShardState]) -> list[int]:
    return [shard for shard, state in states.items() if not state.is_in_range()]
