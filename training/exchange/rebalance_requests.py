"""What other parts of the exchange ask of the rebalancer, which collects it in its next tick.

The parts that ask are below the rebalancer and do not import it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import Fence


class RebalanceRequests:
    """The requests of one node since the rebalancer last collected them."""

    def __init__(self, store: ShardStore) -> None:
        self._store = store
        self._awake = asyncio.Event()
        self._orphans: dict[int, None] = {}
        #: Whether a delta has waited for a backup of its shard.
        self.has_waiting_deltas = False

    def wake_for_delta(self) -> None:
        """A delta waits until its shard has a backup."""
        self.has_waiting_deltas = True
        self.wake()

    def wake(self) -> None:
        """Start the next tick at once."""
        self._awake.set()

    async def wait(self, timeout_s: float) -> None:
        """Return at the next `wake`, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._awake.wait()
        self._awake.clear()

    def take_over(self, shard: int) -> None:
        """This shard has no living owner, and this node is the first living candidate or has a copy."""
        self._orphans[shard] = None

    def collect_orphans(self) -> list[int]:
        """The shards to take over."""
        orphans = list(self._orphans)
        self._orphans.clear()
        return orphans

    def challenge(self, fences: Iterable[Fence]) -> None:
        """Another node has seen these terms: an owner below one of them has to yield, or to raise its term above."""
        ownership = self._store.ownership
        for fence in fences:
            is_news = fence.shard in self._store.owned and fence.term > ownership.fence(fence.shard)
            if is_news and ownership.is_plausible(fence.term):
                ownership.raise_fence(fence.shard, fence.term)
                self.wake()
