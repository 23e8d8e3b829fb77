"""Looks for members that do not answer this node: whether they answer again, and whether another member reaches them.

`PeerScore` says when a look is due, and what follows. Relays are looked for where this node depends on the member: for
owners, and partners of its own shards. Nothing is taken over while a relay is known (`SwarmView.is_gone`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import TransportError
from p2pnode.training.exchange.rebalance_requests import RebalanceRequests
from p2pnode.training.exchange.rpc import ExchangeRpc
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.swarm_view import SwarmView
from p2pnode.training.swarm import Swarm

#: Members asked at once whether they reach another one.
RELAYS_ASKED = 3
#: A take-over waits so long for their answers: they pinged the owner in vain a moment ago, or did not.
SEARCH_WITHIN_S = 0.75


@dataclass(eq=False)
class RouteFinder:
    """Looks for ways to the members that requests of this node depend on."""

    swarm: Swarm
    store: ShardStore
    view: SwarmView
    rpc: ExchangeRpc
    rebalance: RebalanceRequests
    environment: Environment

    def __post_init__(self) -> None:
        self._score = self.view.score
        self._random = self.environment.entropy.random

    def due(self) -> list[Contact]:
        """The members to look for now. One that is no member any more, and that nothing depends on, is forgotten."""
        if not (found := self._score.to_look_for()):
            return []
        due, needed = [], self._needed()
        for node, address in found.items():
            if (contact := self.swarm.contact(node)) is not None or node in needed:
                due.append(contact or Contact(node, address))
            else:
                self._score.forget(node)
        return due

    def _needed(self) -> set[bytes]:
        """Owners, and partners of this node's shards."""
        store = self.store
        found = {known.owner.node_id for known in store.ownership.known_owners.values()}
        found |= {to.node_id for owned in store.owned.values() for to in owned.targets()}
        return found | {backed.owner.node_id for backed in store.backed.values()}

    def owners_to_search(self, shards: Iterable[int]) -> list[Contact]:
        """The owners of these shards that this node alone counts as gone: others may reach them. One that the failure
        detector has declared dead was asked by way of others already."""
        known = (self.store.ownership.known_owners.get(shard) for shard in shards)
        owners = {one.owner.node_id: one.owner for one in known if one is not None}
        return [
            owner
            for node, owner in owners.items()
            if self.view.is_gone(node) and not self.swarm.is_gone(node) and not self._score.was_looked_for(node)
        ]

    async def look(self, members: Iterable[Contact], within_s: float | None = None) -> None:
        """Ask these members, and others whether they reach them; None: for as long as such a question may take."""
        await asyncio.gather(*(self._look(contact, within_s) for contact in members))

    async def _look(self, to: Contact, within_s: float | None) -> None:
        relays = self._relays(to.node_id)
        asked = [asyncio.ensure_future(self.rpc.failure(to, way)) for way in (None, *relays)]
        try:
            await asyncio.wait(asked, timeout=within_s)
        finally:
            for question in asked:
                question.cancel()
            direct, *by_relay = await asyncio.gather(*asked, return_exceptions=True)
        if direct is None:
            self._score.answered(to.node_id)
        else:
            found = (one.node_id for one, failure in zip(relays, by_relay, strict=True) if failure is None)
            self._score.failed(to, direct.detail if isinstance(direct, TransportError) else "it does not answer")
            self._score.looked_for(to.node_id, next(found, b""))
        if not self.view.is_gone(to.node_id):
            self.rebalance.wake()

    def _relays(self, node: bytes) -> list[Contact]:
        """Whom to ask: the relay in use, or a few others."""
        if (contact := self.swarm.contact(self._score.relay(node))) is not None:
            return [contact]
        if node not in self._needed():
            return []
        others = [peer.contact for peer in self.view.not_quarantined() if peer.eligible and peer.node_id != node]
        fit = [
            one for one in others if not (self._score.is_unreached(one.node_id) or self.swarm.is_suspect(one.node_id))
        ]
        return self._random.sample(fit, min(RELAYS_ASKED, len(fit)))
