"""Divides the shards of a swarm that has outgrown them, and follows every division of this node's shards.

The rule is `training.shard_count.outgrown`, for the number of nodes as this node estimates it. It does not matter which
node is the first: whoever hears of a division follows (`training.exchange.divider`), from two members where it is far
finer than that number explains. A node whose `exchange.shards` is given begins none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from overlay.overlay import Overlay
from p2pnode.config.settings import Config
from training import manifest_check
from training.exchange.exchange import Exchange
from training.manifest import Manifest
from training.shard_count import is_expected, outgrown

#: The swarm has outgrown its shards when it is so large at so many looks in a row.
LOOK_INTERVAL_S, LOOKS = 10.0, 3


class ShardDivision:
    """Belongs to one node. `remember` writes to the state directory how the shards are cut."""

    def __init__(
        self, config: Config, overlay: Overlay, remember: Callable[[Manifest], Coroutine[Any, Any, None]]
    ) -> None:
        self._is_fixed = config.exchange.shards != 0
        self._overlay = overlay
        self._remember = remember
        self._tasks: dict[asyncio.Task[None], None] = {}

    def start(self, exchange: Exchange, followers: Sequence[Callable[[Manifest], None]]) -> None:
        """Tell joiners of the manifest. `followers` get that of each division, at once; then joiners are told of it."""

        def divided(manifest: Manifest) -> None:
            for follow in followers:
                follow(manifest)
            manifest_check.register(self._overlay, manifest)
            self._begin(self._remember(manifest))

        manifest_check.register(self._overlay, exchange.manifest)
        exchange.on_divided(divided)
        exchange.expect_divisions(lambda shards: is_expected(shards, self._nodes()))
        if not self._is_fixed:
            self._begin(self._watch(exchange))

    def _nodes(self) -> int:
        return round(self._overlay.population().estimate)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="shard-division")
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def _watch(self, exchange: Exchange) -> None:
        """Divide when the swarm has been too large for a while."""
        looks = 0
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            present, values = exchange.manifest.partition, exchange.manifest.layout.total
            wanted = outgrown(present, values, self._nodes())
            looks = 0 if wanted is None else looks + 1
            if wanted is not None and looks >= LOOKS:
                exchange.divide(wanted)
                looks = 0

    async def stop(self) -> None:
        """Idempotent."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
