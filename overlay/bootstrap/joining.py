"""Joins a swarm, joins again when all peers are gone, and reconnects the sides of a long partition.

After a `hello` succeeded, the node verifies the responder and looks up its own id, which fills its table. Every minute
it dials one known address whose node is not among its peers. The failure detector forgets dead nodes after an hour, but
a partition may last longer. Where no peer is left that could own a shard, it dials every few seconds: one of those that
were away may be back, and cannot dial a node behind a NAT itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Sequence

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.bootstrap.dialer import Dialer, NotThisSwarm, OnlyItself
from p2pnode.overlay.bootstrap.hello import HelloResult
from p2pnode.overlay.bootstrap.lan import LanDiscovery
from p2pnode.overlay.bootstrap.peer_store import PeerStore
from p2pnode.overlay.discovery.lookup_service import LookupService
from p2pnode.overlay.environment import Environment
from p2pnode.overlay.local_node import LocalNode
from p2pnode.overlay.membership.service import Membership

#: The lookup of the own id at the end of a join is cut off after this; the table fills up in the background.
JOIN_LOOKUP_TIMEOUT_S = 2.0
#: The node checks this often whether it has lost all peers, and then dials again.
RECONNECT_INTERVAL_S = 5.0
#: A bootstrap or remembered peer that is not among the present peers is dialled this often. It must outlast the memory
#: of dead nodes (`overlay.membership.failure_detector.DEAD_MEMORY_S`), because a partition may.
HEAL_INTERVAL_S = 60.0


class Joining:
    """Enters the swarm, stores its peers, and enters again when all are gone."""

    def __init__(
        self,
        local: LocalNode,
        dialer: Dialer,
        peer_store: PeerStore,
        lan: LanDiscovery,
        membership: Membership,
        lookups: LookupService,
        environment: Environment,
    ) -> None:
        self._local = local
        self._dialer = dialer
        self._peer_store = peer_store
        self._lan = lan
        self._membership = membership
        self._members = membership.members
        self._lookups = lookups
        self._rng = environment.entropy.random
        self._log = environment.log
        self._callbacks: list[Callable[[], None]] = []
        self._bootstraps: list[str] = []
        #: Why this node has no peers: every bootstrap belongs to another swarm. Empty where it is not so.
        self.refusal = ""

    def on_arrival(self, callback: Callable[[], None]) -> None:
        """Call `callback` after every contact with the swarm through a dialled node."""
        self._callbacks.append(callback)

    @property
    def failures(self) -> dict[str, str]:
        """Last failure by address."""
        return self._dialer.failures

    def load(self) -> None:
        """Read the remembered peers from disk."""
        self._peer_store.load()

    def remembered(self) -> list[Address]:
        """Remembered addresses, without the own one."""
        own = self._local.address
        return [address for address in self._peer_store.addresses() if address != own]

    def known_addresses(self) -> list[Address]:
        """Remembered addresses, and those discovered in the local network, without the own one."""
        own = self._local.address
        discovered = self._lan.addresses()
        self._rng.shuffle(discovered)  # forged ones may outnumber those dialled in one round
        return [address for address in dict.fromkeys([*self.remembered(), *discovered]) if address != own]

    async def join(self, bootstraps: Sequence[str], genesis: bytes | None) -> None:
        """Dial until a node of this swarm answers, enter, and fill the table. Raises `NotThisSwarm`, `OnlyItself`."""
        self._bootstraps = list(bootstraps)
        try:
            result = await self._dialer.dial(self._bootstraps, self.known_addresses, genesis)
        except OnlyItself:
            self._bootstraps = []
            self._dialer.failures.clear()
            raise
        self._local.enter(result.genesis)
        await self._arrive(result)
        through = str(result.contact.address)
        self._log.info("swarm_joined", through=through, peers=len(self._members.peers))

    async def _arrive(self, result: HelloResult) -> None:
        """Verify the node that answered, then look up the own id."""
        self._local.seen_as(result.observed_host)
        self._membership.verify(result.contact)
        try:
            async with asyncio.timeout(JOIN_LOOKUP_TIMEOUT_S):
                await self._lookups.find(self._local.node_id, [result.contact, *result.contacts])
        except TimeoutError:
            self._log.warning("join_lookup_slow", waited_s=JOIN_LOOKUP_TIMEOUT_S)
        for callback in self._callbacks:
            callback()

    async def keep_connected(self) -> None:
        """Dial again when all peers are gone, or all that could own a shard, and there is any address to dial."""
        while True:
            await asyncio.sleep(RECONNECT_INTERVAL_S)
            genesis = self._local.genesis
            if genesis is None or self._members.detector.leaving:
                continue
            if len(self._members.peers):
                self.refusal = ""
                if not any(peer.eligible for peer in self._members.peers):
                    await self._meet(genesis, is_noted=True)
                continue
            others = self.known_addresses()
            if not others and not self._bootstraps:
                continue
            if not self.refusal:
                self._log.info("table_empty", dialling=len(others) + len(self._bootstraps))
            try:
                await self._arrive(await self._dialer.dial(self._bootstraps, self.known_addresses, genesis))
            except NotThisSwarm as error:
                if str(error) != self.refusal:
                    self._log.warning("not_this_swarm", reason=str(error))
                self.refusal = str(error)

    async def heal_partitions(self) -> None:
        """Dial an address of an unknown node every minute; if it is of this swarm, connect to its side."""
        while True:
            await asyncio.sleep(HEAL_INTERVAL_S * (0.5 + self._rng.random()))
            genesis = self._local.genesis
            if genesis is not None and len(self._members.peers) and not self._members.detector.leaving:
                await self._meet(genesis)

    async def _meet(self, genesis: bytes, *, is_noted: bool = False) -> None:
        """Dial one address whose node is unknown now. `is_noted`: `failures` says why it did not answer."""
        peers = self._members.peers
        unknown = self._unknown_address({str(peer.address) for peer in peers} | {str(self._local.address)})
        if unknown is None:
            return
        result = await self._dialer.try_once(unknown, genesis, is_noted=is_noted)
        if result is not None and result.contact.node_id not in peers:
            self._log.info("island_met", through=str(result.contact.address))
            await self._arrive(result)

    def _unknown_address(self, known: Container[str]) -> str | Address | None:
        """A bootstrap or a remembered peer that is not known now, each kind with the same probability.

        The few bootstraps, which usually stay up, must not wait behind many remembered peers that have gone.
        """
        bootstraps: list[str | Address] = [label for label in self._bootstraps if label not in known]
        others: list[str | Address] = [address for address in self.known_addresses() if str(address) not in known]
        kinds = [kind for kind in (bootstraps, others) if kind]
        return self._rng.choice(self._rng.choice(kinds)) if kinds else None

    def note_peers(self) -> None:
        """Take the present peers into what `store_peers` writes, but those that have not answered this node, and those
        whose address a NAT chose: nobody can dial it, and who is started again would wait for them."""
        members = self._members
        self._peer_store.add_live(
            peer for peer in members.peers if members.takes_streams(peer.node_id) and members.is_verified(peer.node_id)
        )

    async def store_peers(self) -> None:
        """Write the present peers to disk, and those noted before."""
        self.note_peers()
        await self._peer_store.write()

    async def keep_storing(self) -> None:
        """Write the peers to disk soon after they changed, until cancelled."""
        while True:
            await asyncio.sleep(self._peer_store.write_interval_s)
            await self.store_peers()
