"""Announces this node in the local network, and joins a swarm through the nodes announced there.

`overlay.bootstrap.local_network` has the rules (which announcements count, who founds); this is the service around
them. Without a `Lan` it announces nothing and finds no node.
"""

from __future__ import annotations

import asyncio

from p2pnode.overlay.bootstrap.joining import Joining
from p2pnode.overlay.bootstrap.local_network import LAN_JOIN_TIMEOUT_S, Lan, LocalNetwork
from p2pnode.overlay.environment import Log
from p2pnode.overlay.local_node import LocalChange, LocalNode


class LanDiscovery:
    """The announcements of one node in its local network."""

    def __init__(self, local: LocalNode, lan: Lan | None, network: LocalNetwork, joining: Joining, log: Log) -> None:
        self._local = local
        self._lan = lan
        self._network = network
        self._joining = joining
        self._log = log
        self._entered = asyncio.Event()
        local.on_change(self._on_change)

    def _on_change(self, change: LocalChange) -> None:
        if change == "swarm":
            self._entered.set()

    @property
    def is_there(self) -> bool:
        """Whether this node announces itself."""
        return self._lan is not None

    async def start(self) -> None:
        """Announce this node. A network without multicast is logged and otherwise ignored."""
        if self._lan is None:
            return
        bound = self._local.bound
        try:
            await self._lan.start(self._network.announce(port=bound.port), bound.host, self._network.on_announcement)
        except OSError as error:
            self._log.warning("lan_discovery_failed", reason=str(error))
            self._lan = None

    async def announce_when_joined(self) -> None:
        """Wait until this node has joined a swarm, then announce that."""
        if self._lan is not None:
            await self._entered.wait()
            await self._lan.announce(self._network.announce(joined=True))

    async def stop(self) -> None:
        """Withdraw the announcement."""
        if self._lan is not None:
            await self._lan.stop()

    async def has_local_peer(self) -> bool:
        """Whether the local network has, or soon will have, a node of this run to join."""
        return self._lan is not None and await self._network.wait_for_peer()

    async def join(self) -> bool:
        """Join through an announced node; False if this node should found the swarm. Retries until cancelled while a
        node that does not answer announces that it is in a swarm."""
        while await self.has_local_peer():
            try:
                async with asyncio.timeout(LAN_JOIN_TIMEOUT_S):
                    await self._joining.join([], self._local.genesis)
                    return True
            except TimeoutError:
                self._log.warning("neighbours_do_not_answer", attempts=dict(self._joining.attempts))
                self._network.drop_lowest()
        return False
