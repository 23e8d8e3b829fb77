"""Who may own a key, in order: the live, eligible nodes among the k closest to it, by rendezvous ranking.

No lookup is needed where the table holds (nearly) everybody: always in a swarm of at most k nodes, usually in one of a
few hundred. In a larger one the k closest come from a lookup that is kept for a while, joined with what the table
knows, so that a death, a leave or a newcomer shows at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from overlay.discovery.lookup_service import LookupService
from overlay.discovery.peer_sampling import PeerSampler
from overlay.discovery.placement import rank
from overlay.environment import Clock
from overlay.local_node import LocalNode
from overlay.membership.service import Membership
from overlay.membership.stream_health import StreamHealth
from overlay.peers import Activity, Contact, PeerChange

#: A lookup is kept this long: deaths and known newcomers are seen without it.
CACHE_TTL_S = 30.0
MAX_CACHED_KEYS = 8192


@dataclass(slots=True)
class _Kept:
    at: float
    node_ids: list[bytes]


class Candidates:
    """Candidates by key, with the cache of lookups behind them."""

    def __init__(
        self,
        local: LocalNode,
        k: int,
        membership: Membership,
        stream_health: StreamHealth,
        lookups: LookupService,
        sampler: PeerSampler,
        clock: Clock,
    ) -> None:
        self._local = local
        self._k = k
        self._members = membership.members
        self._stream_health = stream_health
        self._lookups = lookups
        self._sampler = sampler
        self._clock = clock
        self._cached: dict[bytes, _Kept] = {}
        self._under_way: dict[bytes, asyncio.Future[None]] = {}
        membership.on_change(self._on_change)

    async def of(self, key: bytes) -> list[Contact]:
        """Candidates for a key, best first."""
        kept = [] if self._sampler.knows_nearly_all() else await self._looked_up(key)
        closest = self._closest(key, kept, self._local.contact)
        eligible = {
            node_id: contact
            for node_id, contact in closest.items()
            if (self._local.may_own if node_id == self._local.node_id else self._may_own(node_id))
        }
        return [eligible[node_id] for node_id in rank(key, eligible)]

    def _may_own(self, node_id: bytes) -> bool:
        peer = self._members.peer(node_id)
        return (
            peer is not None
            and peer.eligible
            and peer.activity is not Activity.LEAVING
            and not self._members.detector.is_suspect(node_id)
            and self._stream_health.is_reachable(node_id)
        )

    def _closest(self, key: bytes, kept: Iterable[bytes], own: Contact) -> dict[bytes, Contact]:
        """The k closest of the lookup and of what came up since, without those that died since."""
        known = {own.node_id: own}
        for node_id in kept:
            contact = self._members.contact(node_id)
            if contact is not None:
                known[node_id] = contact
        for peer in self._members.peers:
            known[peer.node_id] = peer.contact
        if len(known) <= self._k:
            return known
        number = int.from_bytes(key, "big")
        nearest = sorted(known, key=lambda node_id: int.from_bytes(node_id, "big") ^ number)
        return {node_id: known[node_id] for node_id in nearest[: self._k]}

    async def _looked_up(self, key: bytes) -> list[bytes]:
        now = self._clock.monotonic()
        kept = self._cached.get(key)
        if kept is not None and now - kept.at <= CACHE_TTL_S:
            return kept.node_ids
        under_way = self._under_way.get(key)
        if under_way is not None:
            await asyncio.shield(under_way)
            kept = self._cached.get(key)
            return kept.node_ids if kept is not None else []
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._under_way[key] = done
        try:
            found = await self._lookups.find(key)
        finally:
            del self._under_way[key]
            done.set_result(None)
        node_ids = [contact.node_id for contact in found]
        self._cached.pop(key, None)
        self._cached[key] = _Kept(self._clock.monotonic(), node_ids)
        if len(self._cached) > MAX_CACHED_KEYS:
            del self._cached[next(iter(self._cached))]
        return node_ids

    def _on_change(self, change: PeerChange) -> None:
        """No kept lookup names a node any longer that is dead or has left."""
        if change.kind in ("dead", "left"):
            for kept in self._cached.values():
                if change.node_id in kept.node_ids:
                    kept.node_ids.remove(change.node_id)

    def has_cached(self, node_id: bytes) -> bool:
        """Whether a kept lookup names this node."""
        return any(node_id in kept.node_ids for kept in self._cached.values())

    def expire(self) -> None:
        now = self._clock.monotonic()
        self._cached = {key: kept for key, kept in self._cached.items() if now - kept.at <= CACHE_TTL_S}
