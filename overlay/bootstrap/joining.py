"""Joining and staying connected: what happens around a successful dial, when the table has run empty, and, now and
then, for ever, whether there are others of our swarm that nobody here knows any more (islands of a long partition)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Sequence

from overlay.addresses import Address
from overlay.bootstrap.dialer import Dialer, NotThisSwarm
from overlay.bootstrap.hello import HelloResult
from overlay.bootstrap.local_network import LocalNetwork
from overlay.bootstrap.peer_store import PeerStore
from overlay.discovery.lookup_service import LookupService
from overlay.environment import Environment
from overlay.local_node import LocalNode
from overlay.membership.service import Membership

#: The lookup of ourselves that ends a join is cut off after this; the table fills in the background.
JOIN_LOOKUP_TIMEOUT_S = 2.0
#: The table is looked at this often; empty, the node dials again.
RECONNECT_INTERVAL_S = 5.0
#: A bootstrap or remembered peer that is not among our peers is dialled this often: the dead are given up after an hour
#: (`overlay.membership.failure_detector.DEAD_MEMORY_S`), a partition may last longer.
HEAL_INTERVAL_S = 60.0


class Joining:
    """Enters the swarm, remembers its peers, and enters again when everybody is gone."""

    def __init__(
        self,
        local: LocalNode,
        dialer: Dialer,
        peer_store: PeerStore,
        local_network: LocalNetwork,
        membership: Membership,
        lookups: LookupService,
        environment: Environment,
    ) -> None:
        self._local = local
        self._dialer = dialer
        self._peer_store = peer_store
        self._local_network = local_network
        self._membership = membership
        self._members = membership.members
        self._lookups = lookups
        self._rng = environment.entropy.random
        self._log = environment.log
        self._callbacks: list[Callable[[], None]] = []
        self._bootstraps: list[str] = []

    def on_arrival(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever this node has met the swarm, or others of it, through a dialled node."""
        self._callbacks.append(callback)

    @property
    def attempts(self) -> dict[str, str]:
        """Last failure by address."""
        return self._dialer.attempts

    def load(self) -> None:
        self._peer_store.load()

    def remembered(self) -> list[Address]:
        """Remembered addresses but our own."""
        own = self._local.address
        return [address for address in self._peer_store.addresses() if address != own]

    def known_addresses(self) -> list[Address]:
        """Remembered addresses, and those sighted in the local network, but our own."""
        own = self._local.address
        sighted = self._local_network.addresses()
        self._rng.shuffle(sighted)  # more of them than are dialled at once may be made up
        return [address for address in dict.fromkeys([*self.remembered(), *sighted]) if address != own]

    async def join(self, bootstraps: Sequence[str], genesis: bytes | None) -> None:
        """Dial until somebody of our swarm answers, and look around. Raises `NotThisSwarm`."""
        self._bootstraps = list(bootstraps)
        greeted = await self._dialer.dial(self._bootstraps, self.known_addresses, genesis)
        self._local.enter(greeted.genesis)
        await self._arrive(greeted)
        through = str(greeted.contact.address)
        self._log.info("swarm_joined", through=through, peers=len(self._members.peers))

    async def _arrive(self, greeted: HelloResult) -> None:
        """Meet the node that answered, then all around us."""
        self._local.seen_as(greeted.observed_host)
        self._membership.verify(greeted.contact)
        try:
            async with asyncio.timeout(JOIN_LOOKUP_TIMEOUT_S):
                await self._lookups.find(self._local.node_id, [greeted.contact, *greeted.contacts])
        except TimeoutError:
            self._log.warning("join_lookup_slow", waited_s=JOIN_LOOKUP_TIMEOUT_S)
        for callback in self._callbacks:
            callback()

    async def keep_connected(self) -> None:
        """Dial again when nobody is left and there is somebody to dial."""
        while True:
            await asyncio.sleep(RECONNECT_INTERVAL_S)
            genesis = self._local.genesis
            if genesis is None or len(self._members.peers) or self._members.detector.leaving:
                continue
            others = self.known_addresses()
            if not others and not self._bootstraps:
                continue
            self._log.info("table_empty", dialling=len(others) + len(self._bootstraps))
            try:
                await self._arrive(await self._dialer.dial(self._bootstraps, self.known_addresses, genesis))
            except NotThisSwarm as error:
                self._log.warning("not_this_swarm", reason=str(error))

    async def heal_partitions(self) -> None:
        """Dial one whom we do not know, now and then; meet it, and all around it, if it is of our swarm."""
        while True:
            await asyncio.sleep(HEAL_INTERVAL_S * (0.5 + self._rng.random()))
            genesis, peers = self._local.genesis, self._members.peers
            if genesis is None or not len(peers) or self._members.detector.leaving:
                continue
            stranger = self._stranger({str(peer.address) for peer in peers} | {str(self._local.address)})
            if stranger is None:
                continue
            greeted = await self._dialer.try_once(stranger, genesis)
            if greeted is not None and greeted.contact.node_id not in peers:
                self._log.info("island_met", through=str(greeted.contact.address))
                await self._arrive(greeted)

    def _stranger(self, known: Container[str]) -> str | Address | None:
        """A bootstrap or a remembered peer, as likely the one as the other: the few that are meant to stay must not
        wait behind the many that have gone."""
        bootstraps: list[str | Address] = [label for label in self._bootstraps if label not in known]
        others: list[str | Address] = [address for address in self.known_addresses() if str(address) not in known]
        kinds = [kind for kind in (bootstraps, others) if kind]
        return self._rng.choice(self._rng.choice(kinds)) if kinds else None

    def store_peers(self) -> None:
        """Put the peers of this moment on disk."""
        self._peer_store.add_live(self._members.peers)
        self._peer_store.write()

    async def keep_storing(self) -> None:
        """Soon after they changed."""
        while True:
            await asyncio.sleep(self._peer_store.write_interval_s)
            self.store_peers()
