"""Keeps the routing table fresh, and finds every node of the swarm while `all_members` is called.

A node looks up its own id every minute, and at once when a dead peer returns, because others may have returned with it.
In a large swarm the member list holds only some of the peers. A crawl looks up every zone of the id space to find the
rest; it is repeated while `all_members` is called.
"""

from __future__ import annotations

import asyncio
import math

from p2pnode.overlay.discovery.candidates import Candidates
from p2pnode.overlay.discovery.lookup_service import LookupService
from p2pnode.overlay.discovery.peer_sampling import PeerSampler
from p2pnode.overlay.environment import Environment
from p2pnode.overlay.ids import ID_BITS, distance, random_id_with_prefix
from p2pnode.overlay.local_node import LocalNode
from p2pnode.overlay.membership.service import Membership
from p2pnode.overlay.peers import Peer, PeerChange

#: Seconds between refreshes of the table, and the delay of the refresh after a dead peer returned.
REFRESH_INTERVAL_S = 60.0
REFRESH_DELAY_S = 0.2
#: Seconds between crawls while all members are asked for; a zone of a crawl holds about this many nodes.
CRAWL_INTERVAL_S = 30.0
ZONE_NODES = 8.0


class Crawler:
    """Refreshes the routing table, and crawls the id space on demand."""

    def __init__(
        self,
        local: LocalNode,
        k: int,
        membership: Membership,
        lookups: LookupService,
        sampler: PeerSampler,
        candidates: Candidates,
        environment: Environment,
    ) -> None:
        self._local = local
        self._k = k
        self._members = membership.members
        self._movement = membership.members.movement
        self._lookups = lookups
        self._sampler = sampler
        self._candidates = candidates
        self._clock = environment.clock
        self._rng = environment.entropy.random
        self._refresh_now = asyncio.Event()
        self._crawl_wanted = asyncio.Event()
        self._crawl_until = 0.0
        membership.on_change(self._on_change)

    def _on_change(self, change: PeerChange) -> None:
        if change.kind == "returned":
            self._refresh_now.set()

    def all_members(self, since: float = 0.0) -> list[Peer]:
        """All live peers known that count for barriers. In a large swarm each call keeps the crawl repeating for a
        while."""
        now = self._clock.monotonic()
        if not self._members.all_known():
            if now > self._crawl_until:
                self._crawl_wanted.set()
            self._crawl_until = now + 2 * CRAWL_INTERVAL_S
        return [peer for peer in self._members.peers if peer.counts_for_barrier(now, since)]

    async def keep_table_fresh(self) -> None:
        """Look up the own id every minute, and at once when a dead peer returned; remove unused entries."""
        while True:
            pause_s = REFRESH_INTERVAL_S * (0.75 + 0.5 * self._rng.random())
            try:
                async with asyncio.timeout(pause_s):
                    await self._refresh_now.wait()
                    await asyncio.sleep(REFRESH_DELAY_S)
            except TimeoutError:
                pass
            self._refresh_now.clear()
            await self._lookups.find(self._local.node_id)
            if not self._members.all_known():
                await self._lookups.find(self._far_target())
            if not self._is_crawling():
                self._members.forget_unused(frozenset(self._sampler.pool.ids()))
            self._candidates.expire()
            self._movement.drop_ended()

    def _far_target(self) -> bytes:
        """A random id that shares a short prefix of random length with the own id: each call refreshes another
        bucket."""
        bits = self._rng.randrange(8)
        number = int.from_bytes(self._local.node_id, "big") >> (ID_BITS - bits - 1)
        return random_id_with_prefix(number ^ 1, bits + 1, self._rng)

    def _is_crawling(self) -> bool:
        return self._clock.monotonic() < self._crawl_until

    async def keep_crawling(self) -> None:
        """Crawl the id space repeatedly while all members are asked for."""
        while True:
            await self._crawl_wanted.wait()
            await self.crawl()
            await asyncio.sleep(CRAWL_INTERVAL_S)
            if not self._is_crawling():
                self._crawl_wanted.clear()

    async def crawl(self) -> None:
        """Look up every zone of the id space; the lookups insert the nodes that answer."""
        bits = max(0, math.ceil(math.log2(self._sampler.population().estimate / ZONE_NODES)))
        zones = [(prefix, bits) for prefix in range(1 << bits)]
        while zones:
            prefix, bits = zones.pop()
            target = random_id_with_prefix(prefix, bits, self._rng)
            found = await self._lookups.find(target)
            if len(found) >= self._k and distance(target, found[-1].node_id) < 1 << (ID_BITS - bits):
                # All k nodes found are inside the zone, so it may hold more.
                zones += [(prefix << 1 | 1, bits + 1), (prefix << 1, bits + 1)]
