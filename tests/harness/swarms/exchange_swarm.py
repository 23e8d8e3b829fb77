"""Many real exchanges on a light network: the code of `training/exchange` is real, everything below it is simulated.

The overlay (live peers, eligible peers, requests between nodes) is a table and a few timers. So a history of fifty
nodes takes a fraction of a second. Each node detects failures and returns late, and at its own time. Requests are lost
in either direction, duplicated, delayed and reordered. Those to a paused or partitioned node arrive when it can be
reached again, long after their sender has timed out. Everything follows from one seed.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.environment import Environment, Log
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import RequestRejected, TransportError
from p2pnode.training.exchange.directory import shard_key
from p2pnode.training.exchange.exchange import Exchange
from p2pnode.training.exchange.recovery.rebalancing import TENURE_S
from p2pnode.training.manifest import PROTOCOL, Manifest
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards.outer_rule import Rule
from tests.harness.environment.simulated import InlineExecutor, ListLog, MemoryDisk, Record, VirtualClock
from tests.harness.swarms.exchange_overlay import HANDLED, Distances, Overlay, chunks, collected
from tests.harness.trainers.stub_trainer import plain_layout

GENESIS = b"g" * 16
#: Seconds until a node detects a failure, and until it notices a return; drawn for each node.
DETECTED_S = (2.0, 5.5)
RETURNED_S = (0.1, 2.0)

#: Sees every request when it is sent: the names of sender and receiver, the request's name, and its payload.
Observer = Callable[[str, str, str, bytes], None]
#: Whether a fault strikes a request: the names of sender and receiver, and the request's name.
Strikes = Callable[[str, str, str], bool]


@dataclass
class Links:
    """Faults of requests: shares of all requests, and seconds one way. A torn body breaks between or inside frames."""

    loss: float = 0.0
    duplicate: float = 0.0
    slow: float = 0.0
    torn: float = 0.0
    delay_s: tuple[float, float] = (0.001, 0.02)
    slow_s: tuple[float, float] = (0.3, 2.5)
    #: Seconds that a whole state is under way, at most: deltas are added meanwhile.
    state_s: float = 0.0


class StartEntropy:
    """The randomness of one start of a node."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)

    def token(self, size_bytes: int) -> bytes:
        return self.random.randbytes(size_bytes)


@dataclass
class Member:
    """One machine: its disk remains when its process ends."""

    name: str
    contact: Contact
    disk: MemoryDisk = field(default_factory=MemoryDisk)
    starts: int = 0
    overlay: Overlay | None = None
    exchange: Exchange | None = None
    worker: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        return self.exchange is not None


#: Where no machine is: an address that somebody made up.
NOBODY = Member("nobody", Contact(b"\x00" * 20, Address("10.255.255.255", 1)))


class World:
    """All machines and the network between them."""

    def __init__(
        self,
        seed: int,
        *,
        settings: ExchangeSettings,
        shards: int,
        values: int,
        synchronous: bool,
        tenure_s: float = TENURE_S,
    ) -> None:
        self.seed = seed
        self.random = random.Random(f"{seed}/world")
        self.clock = VirtualClock()
        self.links = Links()
        self.records: list[Record] = []
        self.members: dict[str, Member] = {}
        self.settings = settings
        self._tenure_s = tenure_s
        self.synchronous = synchronous
        self.requests = 0
        self.observers: list[Observer] = []
        #: Requests that their receiver rejects, and requests whose answers are lost.
        self.rejected: list[Strikes] = []
        self.unanswered: list[Strikes] = []
        #: Whether nodes train; if not, none is counted as a worker.
        self.training = True
        #: Capacity classes that nodes have announced.
        self.capacities: dict[bytes, int] = {}
        #: Of each shard the names of its best candidates, best first; the others follow by the distance of their ids.
        self.preferred: dict[int, list[str]] = {}
        #: Ids of nodes that nobody can dial.
        self.hidden: dict[bytes, None] = {}
        #: How far apart the barrier lets nodes be; None: there is none.
        self.staleness: int | None = None
        self.make_log: Callable[[str], Log] = lambda name: ListLog(self.records, name, self.clock)
        self._by_address: dict[Address, Member] = {}
        self._by_id: dict[bytes, Member] = {}
        self.distances = Distances()
        self._groups: dict[str, int] = {}
        self._paused: dict[str, None] = {}
        self._cuts: dict[tuple[str, str], None] = {}
        self._held: list[tuple[Member, Member, Callable[[], None]]] = []
        self.manifest = Manifest(
            protocol=PROTOCOL,
            run="world",
            genesis=GENESIS.hex(),
            task="stub",
            task_version="1",
            layout=plain_layout(values),
            frozen_digest="",
            shards=shards,
            rule=Rule(settings.outer_lr, settings.outer_momentum, settings.robust),
            weight=settings.weight,
            replicas=settings.replicas,
            local_steps=1,
            barrier_family="bsp" if synchronous else "relaxed",
            max_steps=0,
            until="",
        )

    # -- machines

    def member(self, name: str) -> Member:
        if name not in self.members:
            number = len(self.members) + 1
            node_id = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()[:20]
            contact = Contact(node_id, Address(f"10.0.{number // 250}.{number % 250 + 1}", 8468))
            self.members[name] = Member(name, contact)
            self._by_address[contact.address] = self._by_id[node_id] = self.members[name]
            self.distances.add(contact)
        return self.members[name]

    def member_of(self, node_id: bytes) -> Member | None:
        return self._by_id.get(node_id)

    async def start(self, name: str, *, founder: bool = False, manifest: Manifest | None = None) -> Member:
        """Start a process on a machine, with the shards that the swarm has, or those of `manifest`. It knows all nodes
        it can reach, and these learn of it after a while."""
        member = self.member(name)
        member.starts += 1
        overlay = Overlay(self, name, member.contact, member.starts)
        others = [one for one in self.members.values() if one.overlay is not None and one is not member]
        exchange = Exchange(
            swarm=overlay,  # type: ignore[arg-type]
            manifest=manifest or self.manifest,
            settings=self.settings,
            staleness=self.staleness,
            replica=np.zeros(self.manifest.layout.total, np.float32),
            incarnation=member.starts,
            environment=Environment(
                clock=self.clock,
                entropy=StartEntropy(f"{self.seed}/{name}/{member.starts}"),
                disk=member.disk,
                executor=InlineExecutor(),
                log=self.make_log(name),
            ),
        )
        exchange.rebalancer.tenure_s = self._tenure_s
        member.overlay, member.exchange = overlay, exchange
        await exchange.start()
        for other in others:
            if self.reachable(member, other):
                assert other.overlay is not None
                overlay.met(other.overlay)
                asyncio.get_running_loop().call_later(self.random.uniform(*RETURNED_S), self._hear, other, member)
        if founder:
            await exchange.found()
        return member

    def spread(self, member: Member) -> None:
        """Something of a node has changed: the others hear of it after a while."""
        for other in self.running():
            if other is not member and self.reachable(member, other):
                asyncio.get_running_loop().call_later(self.random.uniform(*RETURNED_S), self._hear, other, member)

    def kill(self, name: str, *, left: bool = False) -> None:
        """Kill a process; with `left` the others have received its leave message."""
        member = self.members[name]
        overlay, exchange = member.overlay, member.exchange
        assert overlay is not None
        assert exchange is not None
        overlay.running = False
        for task in [*overlay.tasks, *exchange._tasks, *([member.worker] if member.worker else [])]:
            task.cancel()
        for one in exchange.values.tasks():
            one.halt()
        for delivery in exchange.sent.deliveries.values():
            if delivery.task is not None:
                delivery.task.cancel()
        member.overlay = member.exchange = member.worker = None
        for other in self.running():
            assert other.overlay is not None
            peer = other.overlay.peers.get(member.contact.node_id)
            if left and peer is not None and peer.alive:
                peer.alive = False
                other.overlay.changed(peer.node_id, "left")
        self._watch_all()

    def running(self) -> list[Member]:
        return [member for member in self.members.values() if member.exchange is not None]

    # -- the network

    def part(self, groups: dict[str, int]) -> None:
        self._groups = groups
        self._watch_all()

    def cut(self, source: str, target: str) -> None:
        """Requests of `source` to `target` fail; those in the other direction do not."""
        self._cuts[source, target] = None
        self._watch_all()

    def pause(self, name: str) -> None:
        self._paused[name] = None
        self._watch_all()

    def resume(self, name: str) -> None:
        self._paused.pop(name, None)
        self._watch_all()

    def heal(self) -> None:
        self._groups, self._cuts = {}, {}
        self._paused.clear()
        self._watch_all()
        for member in self.running():  # who started on the other side is heard of now
            for other in self.running():
                if other is not member and other.contact.node_id not in member.overlay.peers:  # type: ignore[union-attr]
                    asyncio.get_running_loop().call_later(self.random.uniform(*RETURNED_S), self._hear, member, other)

    @property
    def parted(self) -> bool:
        """Whether lines are cut."""
        return bool(self._groups or self._cuts)

    def isolated(self, name: str) -> bool:
        return name in self._paused

    def reachable(self, one: Member, other: Member) -> bool:
        """Whether requests of `one` reach `other` and are answered."""
        if one.overlay is None or other.overlay is None:
            return False
        if one.name in self._paused or other.name in self._paused or (one.name, other.name) in self._cuts:
            return False
        return self._groups.get(one.name, 0) == self._groups.get(other.name, 0)

    def hide(self, name: str) -> None:
        """Nobody can dial a node any more: it finds out, and may own nothing."""
        member = self.members[name]
        assert member.overlay is not None
        self.hidden[member.contact.node_id] = None
        member.overlay.eligible = False
        member.overlay._candidates.clear()
        self.spread(member)

    def prefer(self, shards: Iterable[int], *names: str) -> None:
        """These are the best candidates of the shards from now on, the first one before the second."""
        for shard in shards:
            self.preferred[shard] = list(names)
        for member in self.running():
            assert member.overlay is not None
            member.overlay._candidates.clear()

    def place(self, key: bytes, node_id: bytes) -> int:
        """How far behind a preferred candidate of a shard another one is."""
        shard = next((shard for shard in self.preferred if shard_key(GENESIS, shard) == key), None)
        names = [] if shard is None else self.preferred[shard]
        member = self._by_id[node_id]
        return names.index(member.name) if member.name in names else len(names)

    def announce(self, name: str, capacity: int) -> None:
        """A node announces another capacity class."""
        self.capacities[self.members[name].contact.node_id] = capacity
        for member in self.running():
            assert member.overlay is not None
            member.overlay._candidates.clear()

    def stop(self) -> None:
        """Kill all processes; no node notices."""
        names = [member.name for member in self.running()]
        for member in self.members.values():
            if member.overlay is not None:
                member.overlay.running = False
        for name in names:
            self.kill(name)

    def _watch_all(self) -> None:
        """After every fault and its end: plan which node notices it, and when."""
        if not any(member.overlay is not None and member.overlay.running for member in self.members.values()):
            return
        loop = asyncio.get_running_loop()
        released, self._held = self._held, []
        for source, target, arrive in released:
            if target.overlay is not None and self.reachable(source, target):
                loop.call_later(self.random.uniform(0.0, 0.5), arrive)
            elif target.overlay is not None:
                self._held.append((source, target, arrive))
        for member in self.running():
            assert member.overlay is not None
            for other in self.members.values():
                peer = member.overlay.peers.get(other.contact.node_id)
                if other is member or peer is None:
                    continue
                met = self.reachable(member, other) or self.reachable(other, member)
                if met and (not peer.alive or peer.suspect):
                    loop.call_later(self.random.uniform(*RETURNED_S), self._hear, member, other)
                elif not met and peer.alive:
                    after_s = self.random.uniform(*DETECTED_S)
                    loop.call_later(after_s / 2, self._miss, member, member.overlay, other, False)
                    loop.call_later(after_s, self._miss, member, member.overlay, other, True)

    def _hear(self, member: Member, other: Member) -> None:
        if member.overlay is not None and other.overlay is not None and self.reachable(member, other):
            member.overlay.met(other.overlay)

    def _miss(self, member: Member, overlay: Overlay, other: Member, dead: bool) -> None:
        peer = overlay.peers.get(other.contact.node_id)
        if member.overlay is not overlay or peer is None or not peer.alive or self.reachable(member, other):
            return
        if self.reachable(other, member):
            return
        peer.suspect = not dead
        peer.alive = not dead
        overlay.changed(peer.node_id, "dead" if dead else "suspect")

    # -- transport

    def carry(
        self,
        source: Overlay,
        to: Contact,
        name: str,
        payload: bytes,
        buffers: list[bytes],
        answer: asyncio.Future[tuple[bytes, list[bytes]]],
    ) -> None:
        loop, links, chance = asyncio.get_running_loop(), self.links, self.random
        target = self._by_address.get(to.address, NOBODY)
        sender = self._by_address[source.address]
        self.requests += 1
        for observe in self.observers:
            observe(sender.name, target.name, name, payload)

        if any(strikes(sender.name, target.name, name) for strikes in self.rejected):
            _fail(answer, TransportError("rejected", to.address, "the story rejects it"))
            return

        def arrive() -> None:
            overlay = target.overlay
            if overlay is None or not source.running:
                return
            overlay.spawn(self._handle(source, sender, overlay, target, name, payload, buffers, answer))

        if target.overlay is None:
            # Half of the failed nodes are killed processes, whose machine refuses connections; the others are silent.
            if target.contact.node_id[0] % 2:
                loop.call_later(
                    self._delay(), _fail, answer, TransportError("refused", to.address, "no process listens")
                )
            return
        if not self.reachable(sender, target):
            if chance.random() < 0.5 and (sender.name, target.name) not in self._cuts:
                self._held.append((sender, target, arrive))
            return
        if chance.random() < links.loss:
            return
        transfer_s = chance.uniform(0.0, links.state_s) if name == "state" and links.state_s else 0.0
        loop.call_later(self._delay() + transfer_s, arrive)
        if chance.random() < links.duplicate:
            loop.call_later(self._delay() + chance.uniform(0.0, 3.0), arrive)

    def tear(self, buffers: list[bytes]) -> bool:
        """Cut a body, by chance, between two buffers or inside one; True if it was cut."""
        torn = self.links.torn
        if not torn or not buffers or self.random.random() >= torn:
            return False
        whole = self.random.randrange(len(buffers))
        kept = buffers[whole][: self.random.choice((0, self.random.randrange(1 + len(buffers[whole]))))]
        buffers[whole:] = [kept] if kept else []
        return True

    def _delay(self) -> float:
        links = self.links
        slow = self.random.random() < links.slow
        return self.random.uniform(*(links.slow_s if slow else links.delay_s))

    async def _handle(
        self,
        source: Overlay,
        sender: Member,
        overlay: Overlay,
        target: Member,
        name: str,
        payload: bytes,
        buffers: list[bytes],
        answer: asyncio.Future[tuple[bytes, list[bytes]]],
    ) -> None:
        overlay.met(source)
        handler = overlay.handlers.get(name)
        if handler is None:
            _fail(answer, TransportError("rejected", overlay.address, f"does not serve {name}"))
            return
        reset = TransportError("reset", overlay.address, "broke") if self.tear(buffers := list(buffers)) else None
        HANDLED.set(name)
        try:
            async with overlay.limiter.handler(source.node_id, waits=name in overlay.waiting):
                reply = await handler(Contact(source.node_id, source.address), payload, chunks(buffers, reset))
                back = await collected(reply.body)
        except RequestRejected as error:
            _fail(answer, TransportError("rejected", overlay.address, str(error)))
            return
        except TransportError as error:
            _fail(answer, TransportError("reset", overlay.address, str(error)))
            return
        if self.random.random() < self.links.loss or not self.reachable(sender, target):
            return
        if any(strikes(sender.name, target.name, name) for strikes in self.unanswered):
            return

        def deliver() -> None:
            if not answer.done() and source.running and self.reachable(sender, target):
                source.met(overlay)
                answer.set_result((reply.head, back))

        asyncio.get_running_loop().call_later(self._delay(), deliver)


def _fail(answer: asyncio.Future[tuple[bytes, list[bytes]]], error: TransportError) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # the sender may have timed out
