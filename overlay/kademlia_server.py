"""The package's `Server` and `KademliaProtocol`, subclassed: framing, calls, answers, time-outs.

What is replaced, and why (reference/kademlia.md section 2): attribute magic by an explicit table of procedures
(faults 4, 10, 13, 15, 18: no values are stored at all); a task per datagram by synchronous dispatch inside one
`except` that counts (14); five fixed seconds by measured waits with one retry (17); entries that outlive a
cancellation by entries that are popped (3). Everything read passes `overlay.wire.decode` (1, 2).

The protocol moves messages and judges nobody: what an answer, a request or a silence means is its `Listener`'s.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

from kademlia.network import Server
from kademlia.node import Node
from kademlia.protocol import KademliaProtocol

from overlay import wire
from overlay.doors import Clock, Entropy, Log
from overlay.gossip import NewsQueue
from overlay.peers import Beat, Contact, Peer
from overlay.routing import ContactTable
from overlay.timeouts import RoundTrips
from overlay.transport import Address, NodeAddress, Transport, id_behind
from overlay.wire import REQUEST, RESPONSE, Call, Malformed, News, Request, Response, Result, Tell, Twin, Unreached

#: A timer that fires this late shows that our own loop was busy: the wait is granted once more.
EXCUSABLE_LAG_S = 0.05

OnResult = Callable[[Result | None], None]
#: Handles one kind of call: body, caller's beat, its source address, message id. None: answered later, or never.
Procedure = Callable[[Any, Beat, Address, bytes], Result | None]
C = TypeVar("C")

_TELL = Tell()


class Listener(Protocol):
    """What the protocol tells: facts about nodes, as they pass."""

    def answered(self, beat: Beat, source: Address, rtt_s: float | None, asked: Contact) -> None:
        """The node we asked answered; `rtt_s` is None when it had to be asked twice."""

    def impostor(self, beat: Beat, source: Address, asked: Contact) -> None:
        """Another node answered at the address of the one we asked."""

    def spoke(self, beat: Beat, source: Address) -> None:
        """A node asked us something."""

    def silent(self, contact: Contact) -> None:
        """A node did not answer, with a retry."""

    def own_id_used(self, beat: Beat, source: Address) -> None:
        """A datagram claims our own id."""

    def news(self, news: News, sender: bytes) -> None:
        """A piece of gossip."""

    def peer(self, node_id: bytes) -> Peer | None:
        """What is known of a node, for its round trips."""

    def stretch(self) -> float:
        """By how much our own time-outs stretch (local health)."""


class _Pending:
    """A call that waits for its answer."""

    __slots__ = ("blame", "contact", "datagram", "due", "excused", "on_result", "on_slow", "second_s", "sent", "timer")

    def __init__(self, contact: Contact, datagram: bytes, on_result: OnResult, sent: float) -> None:
        self.contact = contact
        self.datagram = datagram
        self.on_result = on_result
        self.on_slow: Callable[[], None] | None = None
        self.sent = sent
        self.due = sent
        self.second_s = 0.0
        self.excused = False
        self.blame = True
        self.timer: asyncio.TimerHandle | None = None


class SwarmProtocol(KademliaProtocol):  # type: ignore[misc]
    """One node's end of the datagram protocol. Nothing it does awaits; it makes no task."""

    def __init__(
        self,
        source_node: Node,
        ksize: int,
        *,
        listener: Listener,
        clock: Clock,
        entropy: Entropy,
        ceiling_s: float,
        log: Log,
    ) -> None:
        super().__init__(source_node, None, ksize)
        self.router: ContactTable = ContactTable(ksize, source_node)
        self.round_trips = RoundTrips(ceiling_s)
        self.queue = NewsQueue()
        self.counters: Counter[str] = Counter()
        self.fragile = False  # tests: an exception in a handler is raised, not counted
        self._outstanding: dict[bytes, _Pending] = {}
        self._procedures: dict[type, Procedure] = {}
        self.own_id: bytes = source_node.id
        self._listener = listener
        self._clock = clock
        self._entropy = entropy
        self._log = log
        self._tag: bytes | None = None
        self._beat: Beat | None = None
        self._head = b""
        self._loop: asyncio.AbstractEventLoop | None = None

    def __getattr__(self, name: str) -> NoReturn:
        """Undo the package's magic that turns every unknown attribute into a remote call."""
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    # -- composition ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self.transport: Transport | None = transport
        self._loop = asyncio.get_running_loop()

    def serve(self, call: type[C], procedure: Callable[[C, Beat, Address, bytes], Result | None]) -> None:
        """Enter a procedure into the table."""
        self._procedures[call] = procedure

    def speak_as(self, beat: Beat, tag: bytes | None) -> None:
        """The own beat and swarm from now on; encoded here once for all datagrams until the next change."""
        self._beat, self._tag = beat, tag
        self._head = wire.encode_head(tag, beat) if tag is not None else b""

    def close(self) -> None:
        """Forget what waits; nobody is called any more."""
        self.transport = None
        for pending in self._outstanding.values():
            if pending.timer is not None:
                pending.timer.cancel()
        self._outstanding.clear()

    # -- asking --------------------------------------------------------------------------------------------------

    def call(
        self,
        contact: Contact,
        body: Call,
        on_result: OnResult,
        *,
        on_slow: Callable[[], None] | None = None,
        limit_s: float | None = None,
        blame: bool = True,
    ) -> None:
        """Ask; `on_result` gets the answer, or None after the waits. `on_slow` is called when the retry goes out.

        `limit_s` replaces the measured waits by one wait without retry. Without `blame` a silence says nothing
        about the contact's health (the silence of a helper, or on behalf of others).
        """
        if self.transport is None or self._tag is None or self._loop is None:
            on_result(None)
            return
        message_id = self._entropy.token(wire.MESSAGE_ID_BYTES)
        now = self._clock.monotonic()
        datagram = wire.encode(REQUEST, message_id, self._head, body, self.queue.take())
        pending = _Pending(contact, datagram, on_result, now)
        if limit_s is None:
            peer = self._listener.peer(contact.node_id)
            first_s, pending.second_s = self.round_trips.waits(peer, self._listener.stretch())
        else:
            first_s = limit_s
        pending.on_slow = on_slow
        pending.blame = blame
        self._outstanding[message_id] = pending
        self._wait(message_id, pending, first_s, now)
        self._send(_home(contact), datagram)

    def tell(self, contact: Contact, news: Sequence[News], body: Tell | Unreached | Twin = _TELL) -> None:
        """Send news now; nothing comes back."""
        if self.transport is None or self._tag is None:
            return
        message_id = self._entropy.token(wire.MESSAGE_ID_BYTES)
        self._send(_home(contact), wire.encode(REQUEST, message_id, self._head, body, news[: wire.MAX_NEWS]))

    def respond(self, message_id: bytes, to: Address, result: Result) -> None:
        """Answer a call, at once or later."""
        if self.transport is None or self._tag is None:
            return
        self._send(to, wire.encode(RESPONSE, message_id, self._head, result, self.queue.take()))

    def _send(self, to: Address, datagram: bytes) -> None:
        self.counters["datagrams_out"] += 1
        self.counters["bytes_out"] += len(datagram)
        assert self.transport is not None
        self.transport.send(to, datagram)

    def _wait(self, message_id: bytes, pending: _Pending, wait_s: float, now: float) -> None:
        assert self._loop is not None
        pending.due = now + wait_s
        pending.timer = self._loop.call_later(wait_s, self._timeout, message_id)

    def _timeout(self, message_id: bytes) -> None:
        pending = self._outstanding.get(message_id)
        if pending is None:
            return
        now = self._clock.monotonic()
        lag_s = now - pending.due
        if lag_s > EXCUSABLE_LAG_S and not pending.excused:
            # Its answer may lie in the socket's buffer behind this timer.
            pending.excused = True
            self._wait(message_id, pending, EXCUSABLE_LAG_S, now)
            return
        if pending.second_s > 0:
            second_s, pending.second_s = pending.second_s, 0.0
            self._wait(message_id, pending, second_s, now)
            self.counters["retries"] += 1
            self._send(_home(pending.contact), pending.datagram)
            if pending.on_slow is not None:
                self._guarded(pending.on_slow)
            return
        del self._outstanding[message_id]
        self.counters["timeouts"] += 1
        if pending.blame:
            self._guarded(self._listener.silent, pending.contact)
        self._guarded(pending.on_result, None)

    # -- being spoken to -----------------------------------------------------------------------------------------

    def datagram_received(self, data: bytes, addr: Address) -> None:
        """Open, check and dispatch one datagram. Never raises; what is dropped is counted by its reason."""
        self.counters["datagrams_in"] += 1
        if self._tag is None:
            self.counters["dropped_no_swarm"] += 1
            return
        try:
            message_id, message = wire.decode(data)
        except Malformed as error:
            self.counters[f"dropped_{error}"] += 1
            return
        if message.tag != self._tag:
            self.counters["dropped_other_swarm"] += 1
            return
        if (sealed_by := id_behind(addr)) and sealed_by != message.beat.node_id:
            self.counters["dropped_in_anothers_name"] += 1
            return
        if message.beat.node_id == self.own_id:
            self.counters["dropped_own_id"] += 1
            self._guarded(self._listener.own_id_used, message.beat, addr)
            return
        if isinstance(message, Response):
            self._guarded(self._accept_response, message_id, message, addr)
        else:
            self._guarded(self._accept_request, message_id, message, addr)

    def _accept_response(self, message_id: bytes, response: Response, source: Address) -> None:
        pending = self._outstanding.pop(message_id, None)
        if pending is None:
            self.counters["dropped_unasked"] += 1
            return
        if pending.timer is not None:
            pending.timer.cancel()
        beat = response.beat
        if beat.node_id != pending.contact.node_id:
            self.counters["impostors"] += 1
            self._listener.impostor(beat, source, pending.contact)
            pending.on_result(None)
            return
        rtt_s: float | None = None
        if pending.second_s > 0:  # neither retried (Karn's rule) nor asked on behalf of others
            rtt_s = self._clock.monotonic() - pending.sent
            self.round_trips.observe(rtt_s)
        self._listener.answered(beat, source, rtt_s, pending.contact)
        self._hear(response.news, beat.node_id)
        pending.on_result(response.body)

    def _accept_request(self, message_id: bytes, request: Request, source: Address) -> None:
        beat = request.beat
        self._listener.spoke(beat, source)
        self._hear(request.news, beat.node_id)
        procedure = self._procedures.get(type(request.body))
        if procedure is None:
            self.counters["dropped_no_procedure"] += 1
            return
        result = procedure(request.body, beat, source, message_id)
        if result is not None:
            self.respond(message_id, source, result)

    def _hear(self, news: list[News], sender: bytes) -> None:
        for piece in news:
            self._listener.news(piece, sender)

    def _guarded(self, function: Callable[..., None], *arguments: Any) -> None:
        """Our own mistakes must not shut the door on everybody: the one place that catches all of them."""
        try:
            function(*arguments)
        except Exception as error:
            if self.fragile:
                raise
            self.counters["faults"] += 1
            if self.counters["faults"] == 1:
                self._log.error("datagram_handler_failed", error=repr(error))


def _home(contact: Contact) -> NodeAddress:
    """Where it lives, with its id: a sealed door seals for the node, not for the address."""
    return NodeAddress.of(contact.address, contact.node_id)


class SwarmServer(Server):  # type: ignore[misc]
    """The package's server without storage: its node and its protocol behind a `Transport`."""

    protocol_class = SwarmProtocol

    def __init__(
        self,
        *,
        ksize: int,
        alpha: int,
        node_id: bytes,
        listener: Listener,
        clock: Clock,
        entropy: Entropy,
        ceiling_s: float,
        log: Log,
    ) -> None:
        super().__init__(ksize, alpha, node_id, storage={})
        self._make = partial(
            self.protocol_class,
            self.node,
            ksize,
            listener=listener,
            clock=clock,
            entropy=entropy,
            ceiling_s=ceiling_s,
            log=log,
        )
        self.protocol: SwarmProtocol = self._create_protocol()

    def _create_protocol(self) -> SwarmProtocol:
        return self._make()

    def attach(self, transport: Transport) -> None:
        """Speak through an opened door (in the place of the package's `listen`)."""
        self.protocol.connection_made(transport)

    def stop(self) -> None:
        self.protocol.close()

    async def _not_kept(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError("this overlay keeps no values, and its transport listens; see overlay.node")

    listen = bootstrap = get = set = set_digest = _not_kept
