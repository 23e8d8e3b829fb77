"""One node's overlay in a swarm of exchanges: its table of the others, and requests on the light network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from p2pnode.overlay.discovery.placement import rank
from p2pnode.overlay.discovery.population import Population, counted
from p2pnode.overlay.line.rate import MeasuredLine
from p2pnode.overlay.peers import STALL_FLOOR_S, STALL_STEPS, Activity, ChangeKind, Contact, PeerChange
from p2pnode.overlay.sockets.concurrency import HandlerLimiter
from p2pnode.overlay.transport import Buffer, ReceivedResponse, Response, TransportError

if TYPE_CHECKING:
    from tests.harness.swarms.exchange_swarm import World

#: Candidates of a shard are the eligible among this many nodes closest to its key, as in Kademlia.
CLOSEST = 20

#: The request whose handler runs in this task, or has begun it; empty: none.
HANDLED: ContextVar[str] = ContextVar("handled", default="")


@dataclass(slots=True)
class Peer:
    """One node in the table of another."""

    node_id: bytes
    contact: Contact
    incarnation: int
    step: int = 0
    eligible: bool = True
    alive: bool = True
    suspect: bool = False
    step_seconds: float = 0.0
    activity: Activity = Activity.READY
    last_heard: float = 0.0
    last_progress: float = 0.0

    @property
    def is_in_first_step(self) -> bool:
        return self.activity is Activity.TRAINING and self.step_seconds == 0.0

    def is_worker(self, now: float) -> bool:
        return self.step > 0

    def counts_for_barrier(self, now: float, since: float = 0.0) -> bool:
        """As `overlay.peers.Peer`, for nodes that all begin together."""
        if self.activity is not Activity.TRAINING:
            return False
        return min(self.last_heard, now) - self.last_progress <= max(STALL_FLOOR_S, STALL_STEPS * self.step_seconds)


async def chunks(buffers: list[bytes], breaks_with: TransportError | None = None) -> AsyncIterator[Buffer]:
    """The buffers; then, with an error, the stream breaks."""
    for buffer in buffers:
        yield buffer
    if breaks_with is not None:
        raise breaks_with


async def collected(body: AsyncIterator[Buffer] | Iterable[Buffer]) -> list[bytes]:
    if hasattr(body, "__aiter__"):
        try:
            return [bytes(buffer) async for buffer in body]
        finally:
            if (aclose := getattr(body, "aclose", None)) is not None:
                await aclose()
    return [bytes(buffer) for buffer in body]


Handler = Callable[[Contact, bytes, AsyncIterator[Buffer]], Awaitable[Response]]


class Distances:
    """The contacts of all machines in the order of their distance from keys: the same for every node that asks."""

    def __init__(self) -> None:
        self._contacts: list[Contact] = []
        self._orders: dict[bytes, list[Contact]] = {}

    def add(self, contact: Contact) -> None:
        self._contacts.append(contact)
        self._orders.clear()

    def of(self, key: bytes) -> list[Contact]:
        """Closest first."""
        found = self._orders.get(key)
        if found is None:
            number = int.from_bytes(key, "big")
            found = sorted(self._contacts, key=lambda one: int.from_bytes(one.node_id, "big") ^ number)
            self._orders[key] = found
        return found


class Overlay:
    """One node's view of the others: what `training.exchange` uses of `training.swarm.Swarm`."""

    def __init__(self, world: World, name: str, contact: Contact, incarnation: int) -> None:
        self.world = world
        self.name = name
        self.node_id = contact.node_id
        self.address = contact.address
        self.incarnation = incarnation
        self.step = 0
        #: As announced; 0: unknown.
        self.step_seconds = 0.0
        self.activity = Activity.READY
        self.eligible = True
        self.line = MeasuredLine()
        self.peers: dict[bytes, Peer] = {}
        self.handlers: dict[str, Handler] = {}
        #: Requests whose handlers may wait for other nodes.
        self.waiting: dict[str, None] = {}
        self.limiter = HandlerLimiter()
        self.callbacks: list[Callable[[PeerChange], None]] = []
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.running = True
        self._candidates: dict[bytes, list[Contact]] = {}

    # -- who is there

    @property
    def is_eligible(self) -> bool:
        return self.eligible

    def is_alive(self, node_id: bytes) -> bool:
        peer = self.peers.get(node_id)
        return peer is not None and peer.alive

    def is_gone(self, node_id: bytes) -> bool:
        peer = self.peers.get(node_id)
        return peer is not None and not peer.alive

    def is_suspect(self, node_id: bytes) -> bool:
        peer = self.peers.get(node_id)
        return peer is not None and peer.suspect

    def suspect(self, node_id: bytes, reason: str) -> None:
        """A hint changes nothing: detection takes the time that was drawn."""

    def members(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.alive]

    def remembered(self) -> list[str]:
        """In these histories every node has met another."""
        return ["somebody"]

    def may_own(self, peer: Peer) -> bool:
        return peer.eligible

    def takes_streams(self, node_id: bytes) -> bool:
        """In these histories a node that lives takes streams, unless it is hidden or the line to it is cut."""
        return node_id not in self.world.hidden

    def workers(self) -> float:
        if not self.world.training:
            return 1.0
        return max(1.0, sum(peer.step > 0 for peer in self.peers.values() if peer.alive) + (self.step > 0))

    def watch(self, node_ids: Iterable[bytes]) -> None:
        """All nodes are watched."""

    def contact(self, node_id: bytes) -> Contact | None:
        peer = self.peers.get(node_id)
        return peer.contact if peer is not None and peer.alive else None

    async def candidates_of_all(self, keys: Sequence[bytes]) -> list[list[Contact]]:
        return [await self.candidates(key) for key in keys]

    async def candidates(self, key: bytes) -> list[Contact]:
        found = self._candidates.get(key)
        if found is None:
            known = (self._known(contact) for contact in self.world.distances.of(key))
            nearest = {contact.node_id: contact for contact in islice(filter(None, known), CLOSEST)}
            fit = [node for node in nearest if (self.eligible if node == self.node_id else self._fit(node))]
            ranked = rank(key, fit, {node: self.capacity(node) for node in fit})
            if self.world.preferred:
                ranked = sorted(ranked, key=lambda node: self.world.place(key, node))
            found = self._candidates[key] = [nearest[node] for node in ranked]
        return found

    def _known(self, contact: Contact) -> Contact | None:
        """The contact, if it is this node's or that of a node which it holds to be alive."""
        if contact.node_id == self.node_id:
            return contact
        peer = self.peers.get(contact.node_id)
        return None if peer is None or not peer.alive else peer.contact

    def capacity(self, node_id: bytes) -> int:
        """In these histories a class is known to all at once."""
        return self.world.capacities.get(node_id, 0)

    def _fit(self, node_id: bytes) -> bool:
        peer = self.peers[node_id]
        return peer.eligible and not peer.suspect

    async def query_steps(self, node_ids: Iterable[bytes]) -> None:
        """Hear of the nodes that can be reached."""
        await asyncio.sleep(0.01)
        me = self.world.members[self.name]
        for node_id in node_ids:
            other = self.world.member_of(node_id)
            if other is not None and other.overlay is not None and self.world.reachable(me, other):
                self.met(other.overlay)

    def population(self) -> Population:
        return counted(1 + len(self.members()))

    def sample(self, count: int, since: float = 0.0) -> list[Peer]:
        found = self.all_members(since)
        return self.world.random.sample(found, min(count, len(found)))

    def all_members(self, since: float = 0.0) -> list[Peer]:
        now = self.world.clock.monotonic()
        return [peer for peer in self.members() if peer.counts_for_barrier(now, since)]

    def on_change(self, callback: Callable[[PeerChange], None]) -> None:
        self.callbacks.append(callback)

    def changed(self, node_id: bytes, kind: ChangeKind, reason: str = "") -> None:
        self._candidates.clear()
        for callback in self.callbacks if self.running else ():
            callback(PeerChange(node_id, kind, reason))

    def met(self, other: Overlay) -> None:
        """A heartbeat of another node has arrived."""
        peer, now = self.peers.get(other.node_id), self.world.clock.monotonic()
        if peer is None:
            self.peers[other.node_id] = Peer(
                other.node_id,
                Contact(other.node_id, other.address),
                other.incarnation,
                other.step,
                other.eligible,
                step_seconds=other.step_seconds,
                activity=other.activity,
                last_heard=now,
                last_progress=now,
            )
            self.changed(other.node_id, "up")
            return
        if other.incarnation < peer.incarnation:
            return
        restarted = other.incarnation > peer.incarnation
        if restarted:
            peer.incarnation, peer.step = other.incarnation, 0
        peer.last_heard = now
        if other.step > peer.step or peer.activity is not other.activity:
            peer.last_progress, peer.activity = now, other.activity
        peer.step = max(peer.step, other.step)
        peer.step_seconds = other.step_seconds
        if peer.eligible != other.eligible:
            peer.eligible = other.eligible
            self._candidates.clear()
        if not peer.alive or peer.suspect:
            was_alive, peer.alive, peer.suspect = peer.alive, True, False
            self.changed(other.node_id, "refuted" if was_alive else "returned")
        if restarted:
            self.changed(other.node_id, "restarted")

    # -- requests

    def register(self, name: str, handler: Handler, *, waits: bool = False) -> None:
        self.handlers[name] = handler
        if waits:
            self.waiting[name] = None

    @asynccontextmanager
    async def request(
        self, to: Contact, name: str, payload: bytes, body: Any = (), *, timeout_s: float
    ) -> AsyncIterator[ReceivedResponse]:
        if not self.running:
            raise TransportError("closed", to.address, "the transport of this node is closed")
        # Two owners that are full of such requests to each other would wait for ever.
        asker = HANDLED.get()
        assert not asker or asker in self.waiting, f"the handler of {asker} waits for {name} of another node"
        buffers = await collected(body)
        answer: asyncio.Future[tuple[bytes, list[bytes]]] = asyncio.get_running_loop().create_future()
        self.world.carry(self, to, name, payload, buffers, answer)
        try:
            async with asyncio.timeout(timeout_s):
                head, back = await answer
        except TimeoutError as error:
            raise TransportError("timeout", to.address, f"was silent for {timeout_s:g} s") from error
        broken = self.world.tear(back)
        yield ReceivedResponse(head, chunks(back, TransportError("reset", to.address, "broke") if broken else None))

    def spawn(self, work: Awaitable[None]) -> None:
        if self.running:
            task = asyncio.ensure_future(work)
            self.tasks[task] = None
            task.add_done_callback(lambda done: self.tasks.pop(done, None))
