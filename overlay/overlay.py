"""The overlay of one node: the API for training and the daemon, and the composition of all services below it.

It builds the services and owns their tasks; every decision is made in a module below it. Two swarms never mix. Each
message but `hello` carries the tag of one genesis. A node that has not entered a swarm accepts no other message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.bootstrap import hello
from p2pnode.overlay.bootstrap.dialer import Dialer, NotThisSwarm, OnlyItself, advertised_address
from p2pnode.overlay.bootstrap.joining import Joining
from p2pnode.overlay.bootstrap.lan import LanDiscovery, ZeroconfLan
from p2pnode.overlay.bootstrap.peer_store import PeerStore
from p2pnode.overlay.discovery.candidates import Candidates
from p2pnode.overlay.discovery.crawler import Crawler
from p2pnode.overlay.discovery.lookup_service import LookupService
from p2pnode.overlay.discovery.peer_sampling import PeerSampler
from p2pnode.overlay.environment import Environment
from p2pnode.overlay.identity import Identity
from p2pnode.overlay.ids import short
from p2pnode.overlay.kademlia.messages import StreamsFailing
from p2pnode.overlay.kademlia.protocol import SwarmServer
from p2pnode.overlay.line.store import CapacityStore
from p2pnode.overlay.line.trial import LineTrial
from p2pnode.overlay.local_node import LocalChange, LocalNode
from p2pnode.overlay.membership.responder import Responder
from p2pnode.overlay.membership.service import Membership
from p2pnode.overlay.nat.port_mapping import Gateway, PortMapper
from p2pnode.overlay.nat.reachability import Reachability
from p2pnode.overlay.peers import Activity, Contact, Heartbeat, Peer, PeerChange
from p2pnode.overlay.report import OverlayReport, PortMappingReport, ReachabilityReport
from p2pnode.overlay.requests import RequestService
from p2pnode.overlay.settings import OverlaySettings
from p2pnode.overlay.supervision import supervised
from p2pnode.overlay.transport import Request, Response, Transport

__all__ = ["NotThisSwarm", "OnlyItself", "Overlay", "PeerChange"]

#: A leave is sent twice, this far apart, because datagrams get lost.
LEAVE_REPEAT_DELAY_S = 0.05


class Overlay:
    """One node in its swarm."""

    def __init__(
        self,
        *,
        identity: Identity,
        incarnation: int,
        boot_id: int,
        settings: OverlaySettings,
        transport: Transport,
        environment: Environment,
        gateway: Gateway | None = None,
        lan: ZeroconfLan | None = None,
    ) -> None:
        """`gateway` maps a port in the router, `lan` announces the node in the local network; None: without."""
        node, swarm, clock = settings.node, settings.swarm, environment.clock
        address = Address(node.host, node.port or 1)
        self.local = local = LocalNode(
            identity.node_id, incarnation, boot_id, swarm.run, address, transport.line, settings.version
        )
        self._identity = identity
        self._advertise = node.advertise
        self._transport = transport
        self._log = environment.log
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = False
        self._server = SwarmServer(identity, settings, environment)
        self._protocol = protocol = self._server.protocol
        self._membership = membership = Membership(local.heartbeat, settings.k, protocol, environment)
        self._members = members = membership.members
        self._detector = members.detector
        self._responder = Responder(membership, protocol)
        self._lookups = lookups = LookupService(local, protocol, members, settings, clock)
        self._sampler = sampler = PeerSampler(local, settings.k, membership, lookups, environment)
        self._candidates = Candidates(local, settings.k, membership, lookups, self._sampler, clock)
        self._crawler = Crawler(local, settings.k, membership, lookups, self._sampler, self._candidates, environment)
        self._requests = RequestService(local, transport, membership, clock)
        self._requests.register_bare(hello.HELLO, self._answer_hello)
        context = hello.HelloContext(identity, boot_id, swarm.run, environment.entropy)
        self._reachability = Reachability(
            local, context, transport, self._requests, members.peers, environment, client_only=node.client_only
        )
        protocol.register(StreamsFailing, self._reachability.on_unreachable_report)
        membership.on_change(self._reachability.on_change)
        self._line_trial = LineTrial(local, transport, members.peers, clock)
        self._capacity_store = CapacityStore(local.line, environment)
        self._port_mapper = None if gateway is None else PortMapper(local, gateway, environment)
        dialer = Dialer(local, transport, context, environment, on_duplicate_identity=members.conflicts.on_proof)
        self._lan = LanDiscovery(local, lan, self._log)
        self._joining = Joining(local, dialer, PeerStore(environment), self._lan, membership, lookups, environment)
        self._joining.on_arrival(self._try_line)
        self._joining.on_arrival(self._reachability.check_now)
        local.on_change(self._on_local_change)
        # What others call of the services, as it is there. Of the peers a suspected one is alive. `failures`: the last
        # failure by bootstrap address.
        self.node_id, self.line, self.failures = local.node_id, local.line, dialer.failures
        self.is_alive = members.peers.__contains__
        self.announce, self.set_willing = local.announce, local.set_willing
        self.peers = members.peers
        self.contact = members.contact
        self.is_gone, self.is_suspect = self._detector.is_gone, self._detector.is_suspect
        self.watch = self._detector.watch
        self.suspect, self.on_change = membership.request_probe, membership.on_change
        self.ping, self.query_steps = membership.ping, membership.query_steps
        self.takes_streams = membership.is_reachable
        self.lookup = lookups.find
        self.population, self.workers, self.sample = sampler.population, sampler.workers, sampler.sample
        self.all_members = self._crawler.all_members
        self.candidates, self.candidates_of_all = self._candidates.of, self._candidates.of_all
        self.capacity = self._candidates.capacity
        self.register, self.request = self._requests.register, self._requests.request

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the transport and start the services. Raises `PortInUse`, `OSError`, `ValueError` (advertise)."""
        self._joining.load()
        self._capacity_store.load()
        advertised = await advertised_address(self._advertise)
        bound = await self._transport.open(self._protocol.datagram_received, self._requests.serve, self._requests.waits)
        self.local.listens_at(bound, advertised)
        self._server.attach(self._transport)
        self._membership.start()
        self._run("sampling", self._sampler.keep_sampling)
        self._run("refresh", self._crawler.keep_table_fresh)
        self._run("crawl", self._crawler.keep_crawling)
        self._run("reachability", self._reachability.run)
        if self._port_mapper is not None:
            self._run("mapping", self._port_mapper.run)
        await self._lan.start()
        if self._lan.is_there:
            self._run("announce", self._lan.announce_when_joined)
        self._run("remember", self._joining.keep_storing)
        self.local.line.on_change(lambda: self._run("capacity", self._capacity_store.write))
        self._run("redial", self._joining.keep_connected)
        self._run("islands", self._joining.heal_partitions)

    async def has_local_peer(self) -> bool:
        """Whether the local network has, or soon will have, a node of this run to join."""
        return await self._lan.has_local_peer()

    async def join_local(self) -> bool:
        """Join through an announced node of the local network; False if this node should found the swarm."""
        return await self._lan.join(self._joining.join, self._joining.failures)

    def found(self, genesis: bytes) -> None:
        """Found the swarm with this genesis (16 bytes), or open it again."""
        self.local.enter(genesis)
        self._line_trial.skip()
        self._reachability.assume_reached()

    async def join(self, bootstraps: Sequence[str], *, genesis: bytes | None) -> None:
        """Dial bootstraps and remembered peers until one is of this swarm, and enter it. Raises `NotThisSwarm`, and of
        it `OnlyItself` where every bootstrap is this node."""
        await self._joining.join(bootstraps, genesis or self.genesis)

    async def leave(self) -> None:
        """Send a leave to all known peers, twice; the transport stays open."""
        self.announce(activity=Activity.LEAVING)
        self._joining.note_peers()  # `stop` writes them, when some may be gone
        news = self._detector.leave_notice()
        for _ in range(2):
            for contact in self._live_contacts():
                self._protocol.send_gossip(contact, [news])
            await asyncio.sleep(LEAVE_REPEAT_DELAY_S)

    async def stop(self) -> None:
        """End the services and close the transport."""
        if self._stopped:
            return
        self._stopped = True
        self._membership.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._lan.stop()
        if self._port_mapper is not None:
            await self._port_mapper.remove()
        await self._joining.store_peers()
        await self._capacity_store.write()
        self._server.stop()
        await self._transport.close()

    def _try_line(self) -> None:
        if self._line_trial.begin():
            self._run("line trial", self._line_trial.run)

    def _run(self, name: str, service: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._stopped:
            return
        running = supervised(name, service, self._on_fault)
        self._tasks = [task for task in self._tasks if not task.done()]  # as those that have written the capacity
        self._tasks.append(asyncio.create_task(running, name=f"overlay {name}"))

    def _on_fault(self, name: str, error: Exception) -> None:
        self._protocol.counters["faults"] += 1
        self._log.error("overlay_service_failed", service=name, error=repr(error))
        if self._protocol.raise_handler_errors:
            raise error

    # -- this node -----------------------------------------------------------------------------------------------

    @property
    def is_eligible(self) -> bool:
        """Whether this node may own: others reach it, and it is willing."""
        return self.local.heartbeat.eligible

    @property
    def address(self) -> Address:
        """Where other nodes reach this one; it may change."""
        return self.local.address

    @property
    def genesis(self) -> bytes | None:
        """The genesis of the swarm that this node has entered; None before."""
        return self.local.genesis

    @property
    def has_admitted(self) -> bool:
        """Whether another node may have entered the swarm through this one."""
        return self.local.has_admitted

    @property
    def heartbeat(self) -> Heartbeat:
        return self.local.heartbeat

    def _on_local_change(self, change: LocalChange) -> None:
        self._protocol.set_heartbeat(self.local.heartbeat, self.local.tag)
        if change in ("role", "address"):
            # Sampling, placement and dialling depend on these changes, so they are sent to peers at once.
            self._membership.send_to_some([])
        if change == "address":
            self._reachability.check_now()

    # -- peers ---------------------------------------------------------------------------------------------------

    @property
    def refusal(self) -> str:
        """Why this node has no peers: every bootstrap belongs to another swarm. Empty where it is not so."""
        return self._joining.refusal

    def remembered(self) -> list[str]:
        """Addresses of peers stored on disk, most recently seen first."""
        return [str(address) for address in self._joining.remembered()]

    def _live_contacts(self) -> list[Contact]:
        return [peer.contact for peer in self.peers]

    def members(self) -> list[Peer]:
        """All live peers known."""
        return list(self.peers)

    async def _answer_hello(self, incoming: Request) -> Response:
        return hello.answer_hello(
            incoming,
            identity=self._identity,
            local=self.local,
            closest=lambda target: self._protocol.router.closest(target, 20),
        )

    def may_own(self, peer: Peer) -> bool:
        """Whether a peer is eligible to own shards and its streams work."""
        return peer.eligible and self._membership.is_reachable(peer.node_id)

    # -- report --------------------------------------------------------------------------------------------------

    def report(self) -> OverlayReport:
        """Counters and sizes, for `/status` and `/metrics`."""
        protocol, mapping = self._protocol, self._port_mapper
        return OverlayReport(
            counters={**protocol.counters, **self._members.counters, **self._requests.counters},
            socket=dict(self._transport.counters),
            peers=len(self.peers),
            calls_waiting=protocol.waiting,
            contacts=len(protocol.router),
            suspects=self._detector.suspects,
            lost=len(self._members.dead_contacts),
            sampling=self._sampler.report(),
            lookup=self._lookups.medians(),
            local_health=self._detector.health.score,
            round_trip_ms=None if (mean := protocol.round_trips.mean_s) is None else 1000 * mean,
            reachable=ReachabilityReport(
                reached=self.local.reached,
                reason=self._reachability.reason,
                confirmed_by=[short(node_id) for node_id in self._reachability.confirmed_by],
            ),
            mapping=None if mapping is None else PortMappingReport(str(mapping.address or ""), mapping.reason),
        )
