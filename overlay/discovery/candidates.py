"""The candidates for owning a key, best first: the live, eligible nodes among the k closest to it.

Rendezvous ranking by capacity orders them (`overlay.discovery.placement`). If the member list holds nearly all nodes,
no lookup is needed. This is always so up to k nodes, and usually up to a few hundred. In a larger swarm a lookup of the
key, every now and then, lets this node meet those closest to it. The k closest are always chosen from the known peers:
a node that answers a lookup proves its id and is one from then on. A failed, leaving or new peer therefore counts at
once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import lru_cache

from p2pnode.overlay.discovery.lookup_service import LookupService
from p2pnode.overlay.discovery.peer_sampling import PeerSampler
from p2pnode.overlay.discovery.placement import rank
from p2pnode.overlay.environment import Clock
from p2pnode.overlay.local_node import LocalNode
from p2pnode.overlay.membership.service import Membership
from p2pnode.overlay.peers import Contact, Peer

#: A key is looked up again after this long; failures and new known peers count without another lookup.
LOOKUP_INTERVAL_S = 30.0
MAX_LOOKED_UP = 8192
#: Orders of candidates that are remembered.
MAX_RANKINGS = 1024


class Candidates:
    """Finds candidates by key."""

    def __init__(
        self,
        local: LocalNode,
        k: int,
        membership: Membership,
        lookups: LookupService,
        sampler: PeerSampler,
        clock: Clock,
    ) -> None:
        self._local = local
        self._k = k
        self._members = membership.members
        self._is_reachable = membership.is_reachable
        self._lookups = lookups
        self._sampler = sampler
        self._clock = clock
        #: When the last lookup of each key ended.
        self._looked_up: dict[bytes, float] = {}
        self._under_way: dict[bytes, asyncio.Future[None]] = {}

    async def of(self, key: bytes) -> list[Contact]:
        """Candidates for a key, best first."""
        return (await self.of_all([key]))[0]

    async def of_all(self, keys: Sequence[bytes]) -> list[list[Contact]]:
        """Candidates for each of these keys, best first. Each peer is looked up once, as long as no lookup waits."""
        found: list[list[Contact]] = []
        known: dict[bytes, Contact] = {}
        fit: dict[bytes, int | None] = {}
        for key in keys:
            if not self._sampler.knows_nearly_all():
                await self._meet_closest(key)
                known, fit = {}, {}  # others may be known now
            known = known or self._known()
            closest = self._closest(key, known)
            for node_id in closest:
                if node_id not in fit:
                    fit[node_id] = self._announced(node_id)
            capacities = {node_id: capacity for node_id in closest if (capacity := fit[node_id]) is not None}
            found.append([closest[node_id] for node_id in _ranked(key, tuple(capacities.items()))])
        return found

    def _announced(self, node_id: bytes) -> int | None:
        """The capacity class of a node that may own a key now; None: it may not."""
        if node_id == self._local.node_id:
            return self._local.line.capacity if self._local.may_own else None
        peer = self._members.peer(node_id)
        return peer.capacity if peer is not None and self._may_own(peer) else None

    def capacity(self, node_id: bytes) -> int:
        """The capacity class of a node; 0 where it has announced none."""
        if node_id == self._local.node_id:
            return self._local.line.capacity
        peer = self._members.peer(node_id)
        return 0 if peer is None else peer.capacity

    def _may_own(self, peer: Peer) -> bool:
        return (
            peer.eligible and not self._members.detector.is_suspect(peer.node_id) and self._is_reachable(peer.node_id)
        )

    def _known(self) -> dict[bytes, Contact]:
        """This node and the known peers."""
        known = {self._local.node_id: self._local.contact}
        for peer in self._members.peers:
            known[peer.node_id] = peer.contact
        return known

    def _closest(self, key: bytes, known: Mapping[bytes, Contact]) -> Mapping[bytes, Contact]:
        """The k closest among the known nodes."""
        if len(known) <= self._k:
            return known
        number = int.from_bytes(key, "big")
        nearest = sorted(known, key=lambda node_id: int.from_bytes(node_id, "big") ^ number)
        return {node_id: known[node_id] for node_id in nearest[: self._k]}

    async def _meet_closest(self, key: bytes) -> None:
        """Look the key up, unless that was done lately. Concurrent calls share one lookup; if it fails, the first
        caller gets the error and the others go on with the peers that are known."""
        last = self._looked_up.get(key)
        if last is not None and self._clock.monotonic() - last <= LOOKUP_INTERVAL_S:
            return
        under_way = self._under_way.get(key)
        if under_way is not None:
            await asyncio.shield(under_way)
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._under_way[key] = done
        try:
            await self._lookups.find(key)
        finally:
            del self._under_way[key]
            done.set_result(None)
        self._looked_up.pop(key, None)
        self._looked_up[key] = self._clock.monotonic()
        if len(self._looked_up) > MAX_LOOKED_UP:
            del self._looked_up[next(iter(self._looked_up))]

    def expire(self) -> None:
        """Forget the lookups that are too old."""
        now = self._clock.monotonic()
        self._looked_up = {key: at for key, at in self._looked_up.items() if now - at <= LOOKUP_INTERVAL_S}


@lru_cache(maxsize=MAX_RANKINGS)
def _ranked(key: bytes, capacities: tuple[tuple[bytes, int], ...]) -> tuple[bytes, ...]:
    """`rank`, remembered: who owns keys asks again and again, and hardly ever has anything changed."""
    announced = dict(capacities)
    return tuple(rank(key, announced, announced))
