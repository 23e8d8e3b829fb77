"""Queries to single peers as coroutines: awaits the callbacks of the protocol. A caller may be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from p2pnode.overlay.kademlia.messages import Call, Ping, Pong, Result
from p2pnode.overlay.kademlia.protocol import SwarmProtocol
from p2pnode.overlay.membership.service import Membership
from p2pnode.overlay.peers import Contact, Heartbeat, heartbeat_of


class PeerQueries:
    """Sends requests and waits until each is answered or timed out."""

    def __init__(self, protocol: SwarmProtocol, membership: Membership) -> None:
        self._protocol = protocol
        self._membership = membership
        self._peers = membership.members.peers

    async def ping(self, contact: Contact) -> Heartbeat | None:
        """The heartbeat of one node; None when it does not answer, or another node does."""
        answered = await self.ask(contact, Ping())
        peer = self._peers.get(contact.node_id)
        return heartbeat_of(peer) if isinstance(answered, Pong) and peer is not None else None

    async def query_steps(self, node_ids: Sequence[bytes]) -> None:
        """Ask all of these that are known, at once; the peer table takes their heartbeats."""
        contacts = [peer.contact for node_id in node_ids if (peer := self._peers.get(node_id)) is not None]
        if not contacts:
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        left = len(contacts)

        def on_result(_: Result | None) -> None:
            nonlocal left
            left -= 1
            if left == 0 and not waiting.done():
                waiting.set_result(None)

        for contact in contacts:
            self._membership.ask(contact, on_result)
        await waiting

    async def ask(self, contact: Contact, body: Call) -> Result | None:
        """Send one request; None when it is not answered."""
        waiting: asyncio.Future[Result | None] = asyncio.get_running_loop().create_future()

        def on_result(result: Result | None) -> None:
            if not waiting.done():  # the caller may have been cancelled
                waiting.set_result(result)

        self._protocol.call(contact, body, on_result)
        return await waiting
