"""Finds a relay to owners and backups that do not answer this node, and the way back to direct requests.

`training.exchange.indirect` decides when. A look asks the member itself and a few others at the same time whether
they reach it. Of the others, the candidates of a shard that the member owns come first: its backup is one of them, and
reaches it. Nothing is taken over while a relay is known (`SwarmView.is_gone`).
"""

from __future__ import annotations

import asyncio

from overlay.peers import Contact
from training.exchange.context import ExchangeContext
from training.exchange.directory import OwnerDirectory

#: Members asked at once whether they reach another one.
RELAYS_ASKED = 3
#: A take-over waits so long for their answers: they pinged the owner in vain a moment ago, or did not.
SEARCH_WITHIN_S = 0.75


class RouteFinder:
    """Looks for ways to the members that requests of this node depend on."""

    def __init__(self, context: ExchangeContext, directory: OwnerDirectory) -> None:
        self._context = context
        self._swarm = context.swarm
        self._store = context.store
        self._view = context.view
        self._routes = context.view.score.routes
        self._rpc = context.rpc
        self._clock = context.environment.clock
        self._log = context.environment.log
        self._directory = directory

    def due(self) -> dict[bytes, Contact]:
        """The members to look for now: owners, and partners of this node's shards."""
        if not self._routes:
            return {}
        now_s, swarm = self._clock.monotonic(), self._swarm
        found: dict[bytes, Contact] = {}
        for contact in self._needed():
            node = contact.node_id
            is_doubted = swarm.is_suspect(node) or swarm.is_gone(node)
            if node != swarm.node_id and self._routes.is_due(node, now_s, is_doubted=is_doubted):
                found[node] = swarm.contact(node) or contact
        return found

    def _needed(self) -> list[Contact]:
        owners = [known.owner for known in self._store.ownership.known_owners.values()]
        partners = [to for owned in self._store.owned.values() for to in owned.targets()]
        return [*owners, *partners, *(backed.owner for backed in self._store.backed.values())]

    async def look(self, members: dict[bytes, Contact]) -> None:
        """Look for ways to these members."""
        await asyncio.gather(*(self._look(contact) for contact in members.values()))

    async def search(self, owners: dict[bytes, Contact]) -> None:
        """Before a take-over: ask others for `SEARCH_WITHIN_S` whether they reach owners that count as gone."""
        await asyncio.gather(*(self._search(contact) for contact in owners.values()))

    async def _search(self, to: Contact) -> None:
        asked = {asyncio.ensure_future(self._rpc.failure(to, relay)): relay for relay in await self._relays(to)}
        if not asked:
            return
        try:
            await asyncio.wait(asked, timeout=SEARCH_WITHIN_S)
        finally:
            for question in asked:
                question.cancel()
            failures = await asyncio.gather(*asked, return_exceptions=True)
        found = (relay.node_id for relay, failure in zip(asked.values(), failures, strict=True) if failure is None)
        node, now_s = to.node_id, self._clock.monotonic()
        self._routes.failed(node, to.address, "it does not answer", now_s)
        self._found(node, next(found, b""), "it does not answer")

    def _found(self, node: bytes, relay: bytes, reason: str) -> None:
        if self._routes.found(node, relay, self._clock.monotonic()):
            self._log.info("route_found", peer=node.hex()[:8], relay=relay.hex()[:8], reason=reason)
        if relay:
            self._view.reached(node)
            self._context.rebalance.wake()

    async def _look(self, to: Contact) -> None:
        node, routes = to.node_id, self._routes
        relays = await self._relays(to)
        direct, *by_relay = await asyncio.gather(*(self._rpc.failure(to, relay) for relay in (None, *relays)))
        if direct is not None:
            found = (one.node_id for one, failure in zip(relays, by_relay, strict=True) if failure is None)
            routes.failed(node, to.address, direct.detail, self._clock.monotonic())
            self._found(node, next(found, b""), direct.detail)
            return
        if routes.reached(node):
            self._log.info("route_direct", peer=node.hex()[:8])
        self._view.reached(node)
        self._context.rebalance.wake()

    async def _relays(self, to: Contact) -> list[Contact]:
        """Whom to ask: the relay in use, or else candidates of a shard of the member, then others."""
        if (relay := self._routes.relay(to.node_id)) and (contact := self._swarm.contact(relay)) is not None:
            return [contact]
        owners = self._store.ownership.known_owners.items()
        shard = next((shard for shard, known in owners if known.owner.node_id == to.node_id), None)
        found = [] if shard is None else await self._directory.candidates(shard)
        others = [peer.contact for peer in self._view.heeded()]
        self._context.environment.entropy.random.shuffle(others)
        relays: dict[bytes, Contact] = {}
        now_s = self._clock.monotonic()
        for contact in [*found, *others]:
            node = contact.node_id
            is_fit = node not in (self._swarm.node_id, to.node_id) and not self._routes.is_unreached(node, now_s)
            if is_fit and not self._swarm.is_suspect(node) and not self._view.is_gone(node):
                relays[node] = contact
            if len(relays) == RELAYS_ASKED:
                break
        return list(relays.values())
