"""The light network of a swarm of exchanges: requests between machines, and the faults of the lines between them.

Each node detects failures and returns late, and at its own time. Requests are lost in either direction, duplicated,
delayed and reordered. Those to a paused or partitioned node arrive when it can be reached again, long after their
sender has timed out. Everything follows from one seed.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import RequestRejected, TransportError
from p2pnode.training.exchange.exchange import Exchange
from tests.harness.environment.simulated import MemoryDisk
from tests.harness.swarms.exchange_overlay import HANDLED, Distances, Overlay, chunks, collected
from tests.harness.swarms.simulated_swarm import ExchangingSwarm

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

    @property
    def node_id(self) -> bytes:
        return self.contact.node_id

    async def push(self, step: int, amount: float | None = None) -> None:
        """A delta of `amount` (None: the step) in each value, acknowledged for all shards."""
        exchange = self.exchange
        delta = np.full(exchange.replica.vector.size, step if amount is None else amount, np.float32)
        report = await exchange.push(step, step - 1, 1.0, delta)
        assert (report.outstanding, report.refused, report.returned) == (0, {}, ())
        # As the step loop does: nobody repairs what is still to be trained.
        exchange.begin_at(step)
        self.overlay.step = step
        self.overlay.world.training = False  # but none is counted as a worker: one delta sets the measure of lengths


#: Where no machine is: an address that somebody made up.
NOBODY = Member("nobody", Contact(b"\x00" * 20, Address("10.255.255.255", 1)))


class LightNetwork(ExchangingSwarm):
    """All machines and the network between them."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.random = random.Random(f"{seed}/world")
        self.links = Links()
        self.members: dict[str, Member] = {}
        self.requests = 0
        self.observers: list[Observer] = []
        #: Requests that their receiver rejects, and requests whose answers are lost.
        self.rejected: list[Strikes] = []
        self.unanswered: list[Strikes] = []
        self.distances = Distances()
        self._by_address: dict[Address, Member] = {}
        self._by_id: dict[bytes, Member] = {}
        self._groups: dict[str, int] = {}
        self._paused: dict[str, None] = {}
        self._cuts: dict[tuple[str, str], None] = {}
        self._held: list[tuple[Member, Member, Callable[[], None]]] = []

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

    def running(self) -> list[Member]:
        return [member for member in self.members.values() if member.exchange is not None]

    # -- faults

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
                if other is not member and other.node_id not in member.overlay.peers:
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

    # -- who notices what

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
            for other in self.members.values():
                peer = member.overlay.peers.get(other.node_id)
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
        peer = overlay.peers.get(other.node_id)
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
