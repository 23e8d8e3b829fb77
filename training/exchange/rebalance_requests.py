"""Requests of other parts of the exchange to the rebalancer: an early tick, take-overs, answers to fences.

Those parts are below the rebalancer and do not import it; it collects the requests in its next tick.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from training.exchange.store.shard_store import ShardStore
from training.exchange.terms import ZERO_TERM, Fence, Term


class RebalanceRequests:
    """The requests of one node since the rebalancer last collected them."""

    def __init__(self, store: ShardStore) -> None:
        self._store = store
        self._awake = asyncio.Event()
        self._orphans: dict[int, None] = {}
        self._challenges: dict[int, Term] = {}
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
        try:
            async with asyncio.timeout(timeout_s):
                await self._awake.wait()
        except TimeoutError:
            pass
        self._awake.clear()

    def take_over(self, shard: int) -> None:
        """This shard has no living owner and this node is the first living candidate."""
        self._orphans[shard] = None

    def collect_orphans(self) -> list[int]:
        orphans = list(self._orphans)
        self._orphans.clear()
        return orphans

    @property
    def has_orphans(self) -> bool:
        return bool(self._orphans)

    def challenge(self, fences: Iterable[Fence]) -> None:
        """Another node has seen these terms: an owner below one of them has to yield, or to raise its term above."""
        for fence in fences:
            owned = self._store.owned.get(fence.shard)
            if owned is not None and fence.term > owned.term and self._store.ownership.is_plausible(fence.term):
                self._challenges[fence.shard] = max(fence.term, self._challenges.get(fence.shard, ZERO_TERM))
                self.wake()

    def challenge_own(self) -> None:
        """Others have claimed terms for this owner that it never had. Whoever believes them takes nothing from it."""
        ownership = self._store.ownership
        for shard, owned in self._store.owned.items():
            fence = ownership.fence(shard)
            if fence > owned.term and not owned.moving and ownership.is_plausible(fence):
                self._challenges[shard] = max(fence, self._challenges.get(shard, ZERO_TERM))

    @property
    def has_challenges(self) -> bool:
        return bool(self._challenges)

    def collect_challenges(self) -> dict[int, Term]:
        """Shards owned here for which another node has seen a higher term, with that term."""
        challenges, self._challenges = self._challenges, {}
        return challenges
