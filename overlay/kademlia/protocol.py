"""Datagram RPC: frames requests and responses, checks and dispatches what arrives, reports events about peers.

Subclasses `KademliaProtocol` of the `kademlia` package and replaces most of it. Procedures are in an explicit table;
the package finds them by attribute name. Dispatch is synchronous, inside one `except` that counts; the package starts a
task for each datagram. Waits are measured and have one retry; those of the package are five fixed seconds. No values
are stored. All input passes `overlay.kademlia.messages.decode`. A response from a contact that is unknown at this
address must prove its id, or it is dropped.

The protocol decides nothing about peers: it reports responses, requests and time-outs to `ProtocolEvents`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, Protocol, TypeVar

from kademlia.network import Server
from kademlia.node import Node
from kademlia.protocol import KademliaProtocol

from p2pnode.overlay.addresses import Address, NodeAddress, id_behind
from p2pnode.overlay.environment import Environment
from p2pnode.overlay.identity import Identity
from p2pnode.overlay.ids import node_id_of
from p2pnode.overlay.kademlia import messages
from p2pnode.overlay.kademlia.calls import PROBE_TIMEOUT_S, CallTable, CallTimes, OnResult, PendingCall
from p2pnode.overlay.kademlia.messages import (
    PROOF_BYTES,
    REQUEST,
    RESPONSE,
    BroadcastQueue,
    Call,
    DuplicateIdentity,
    Gossip,
    GossipOnly,
    Malformed,
    Pong,
    RequestDatagram,
    ResponseDatagram,
    Result,
    StreamsFailing,
)
from p2pnode.overlay.kademlia.routing_table import ContactTable
from p2pnode.overlay.peers import Contact, Heartbeat, Peer
from p2pnode.overlay.settings import OverlaySettings
from p2pnode.overlay.transport import Transport

#: Handles one kind of call: body, caller's heartbeat, its source address, message id. None: answered later, or never.
Procedure = Callable[[Any, Heartbeat, Address, bytes], Result | None]
C = TypeVar("C")

_GOSSIP_ONLY = GossipOnly()
PUBLIC_KEY_BYTES = 32
CONTEXT = b"p2pnode proof\0"


class ProtocolEvents(Protocol):
    """Interprets what happens with other nodes, and knows what the protocol reads of them: the member list."""

    def peer(self, node_id: bytes) -> Peer | None:
        """What is known of a node, its round trips included."""

    def stretch(self) -> float:
        """The factor of this node's time-outs (local health)."""

    def is_doubtful(self, node_id: bytes) -> bool:
        """Whether it is suspected, or remembered as dead or as having left: what is sent to it is probably lost."""

    def on_response(
        self, heartbeat: Heartbeat, source: Address, rtt_s: float | None, asked: Contact, *, proven: bool = False
    ) -> None:
        """The node that was asked answered; `rtt_s` is None when it asked others first. `proven`: it proved its id.
        May arrive late, after `on_timeout`."""

    def on_id_mismatch(self, heartbeat: Heartbeat, source: Address, asked: Contact, *, proven: bool = False) -> None:
        """Another node answered at the address of the one that was asked."""

    def on_request(self, heartbeat: Heartbeat, source: Address) -> None:
        """A node sent a request."""

    def on_timeout(self, contact: Contact) -> None:
        """A node answered neither the call nor its retry."""

    def on_own_id(self, heartbeat: Heartbeat, source: Address, *, proven: bool = False) -> None:
        """A datagram of another process carries this node's id; `proven`: it has the key too."""

    def on_gossip(self, news: Gossip, sender: bytes) -> None:
        """A datagram of `sender` carried this gossip."""


class IdentityProofs:
    """Makes the proofs of this node and checks those of others: signatures by the key whose hash is the id.

    A proof signs the message id of the request, the id of the requester, and the heartbeat of the response. The message
    id is 20 random bytes, so no earlier proof fits. A node enters a table, moves to another address or counts as
    restarted only with a proof. Only a proof shows that another process uses this node's identity. A proof does not
    bind later datagrams; the seal does (`overlay.sealing`).
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def make(self, asker: bytes, message_id: bytes, head: bytes) -> bytes:
        """The proof for one request."""
        return self._identity.public_key + self._identity.sign(_statement(asker, message_id, head))

    def holds(self, proof: bytes, node_id: bytes, asker: bytes, message_id: bytes, head: bytes) -> bool:
        """Whether `node_id` itself answered this request with this head (`overlay.kademlia.messages.encode_head`)."""
        if len(proof) != PROOF_BYTES:
            return False
        public_key, signature = proof[:PUBLIC_KEY_BYTES], proof[PUBLIC_KEY_BYTES:]
        if node_id_of(public_key) != node_id:
            return False
        return self._identity.verifies(public_key, _statement(asker, message_id, head), signature)


def _statement(asker: bytes, message_id: bytes, head: bytes) -> bytes:
    return CONTEXT + asker + message_id + head


class SwarmProtocol(KademliaProtocol):  # type: ignore[misc]
    """One node's end of the datagram protocol. Never awaits, and starts no task."""

    def __init__(
        self,
        source_node: Node,
        ksize: int,
        *,
        proofs: IdentityProofs,
        environment: Environment,
        ceiling_s: float,
    ) -> None:
        super().__init__(source_node, None, ksize)
        self.router: ContactTable = ContactTable(ksize, source_node)
        self.round_trips = CallTimes(ceiling_s)
        self.queue = BroadcastQueue()
        self.counters: Counter[str] = Counter()
        self.raise_handler_errors = False  # for tests: instead of counting the exception
        self._calls = CallTable(
            environment.clock, environment.entropy, self.counters, send=self._send_try, give_up=self._give_up
        )
        self._procedures: dict[type, Procedure] = {}
        self.own_id: bytes = source_node.id
        self._proofs = proofs
        self._events: ProtocolEvents
        self._clock = environment.clock
        self._entropy = environment.entropy
        self._log = environment.log
        self._tag: bytes | None = None
        self._heartbeat: Heartbeat | None = None
        self._head = b""

    def __getattr__(self, name: str) -> NoReturn:
        """The package turns every unknown attribute into a remote call; this does not."""
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    # -- composition ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self.transport: Transport | None = transport

    def subscribe(self, events: ProtocolEvents) -> None:
        """Report events to `events`; once, before the node enters a swarm."""
        self._events = events

    def register(self, call: type[C], procedure: Callable[[C, Heartbeat, Address, bytes], Result | None]) -> None:
        """Answer requests of this kind by a procedure."""
        self._procedures[call] = procedure

    def set_heartbeat(self, heartbeat: Heartbeat, tag: bytes | None) -> None:
        """Set heartbeat and swarm of this node; encoded once for all datagrams until the next change."""
        self._heartbeat, self._tag = heartbeat, tag
        self._head = messages.encode_head(tag, heartbeat) if tag is not None else b""

    def close(self) -> None:
        """End all pending calls: each gets None as after a time-out, and none counts as a failure."""
        self.transport = None
        for pending in self._calls.close():
            self._guarded(pending.on_result, None)

    @property
    def waiting(self) -> int:
        """Calls that wait for their responses."""
        return self._calls.waiting

    def awaits_proof(self, contact: Contact) -> bool:
        """Whether a call waits in which this contact has to prove its id."""
        return self._calls.awaits_proof(contact)

    # -- requests ------------------------------------------------------------------------------------------------

    def call(
        self,
        contact: Contact,
        body: Call,
        on_result: OnResult,
        *,
        on_slow: Callable[[], None] | None = None,
        limit_s: float | None = None,
        counts_as_failure: bool = True,
        require_proof: bool = False,
    ) -> None:
        """Send a request; `on_result` gets the response, or None after the waits. `on_slow`: the retry goes out.

        `limit_s` replaces the measured waits by one wait without retry. Without `counts_as_failure` a time-out is no
        event (the callee asks others first, or this node asks for another). A contact that is unknown at this address
        must prove its id; `require_proof` demands it of a known one too.
        """
        if self.transport is None or self._tag is None:
            on_result(None)
            return
        if self._calls.is_full:
            self.counters["calls_not_made"] += 1
            on_result(None)
            return
        now = self._clock.monotonic()
        peer = self._events.peer(contact.node_id)
        require_proof = require_proof or peer is None or peer.address != contact.address
        first_s, second_s = limit_s, 0.0
        if first_s is None:
            first_s, second_s = self.round_trips.waits(peer, self._events.stretch())
        pending = PendingCall(
            contact, body, on_result, on_slow, second_s, counts_as_failure, require_proof, timed=limit_s is None
        )
        self._calls.start(pending, first_s, now)

    def _send_try(self, message_id: bytes, pending: PendingCall) -> None:
        # Gossip goes out a bounded number of times. When some members die at one moment, all that a node has to say of
        # them would go out with its probes of them, and nobody would hear it.
        is_lost = pending.is_retried or self._events.is_doubtful(pending.contact.node_id)
        news = [] if is_lost else self.queue.take()
        self._send(
            _node_address(pending.contact),
            messages.encode(REQUEST, message_id, self._head, pending.body, news, pending.require_proof),
        )
        if pending.on_slow is not None and pending.is_retried:
            self._guarded(pending.on_slow)

    def _give_up(self, pending: PendingCall) -> None:
        if pending.counts_as_failure:
            self._guarded(self._events.on_timeout, pending.contact)
        self._guarded(pending.on_result, None)

    def send_gossip(
        self,
        contact: Contact,
        news: Sequence[Gossip],
        body: GossipOnly | StreamsFailing | DuplicateIdentity = _GOSSIP_ONLY,
    ) -> None:
        """Send gossip now, with a body that is not answered."""
        if self.transport is None or self._tag is None:
            return
        message_id = self._entropy.token(messages.MESSAGE_ID_BYTES)
        self._send(
            _node_address(contact), messages.encode(REQUEST, message_id, self._head, body, news[: messages.MAX_GOSSIP])
        )

    def respond(self, message_id: bytes, to: Address, result: Result, *, prove_to: bytes = b"") -> None:
        """Answer a request, now or later; with a proof, if the requester `prove_to` demands one."""
        if self.transport is None or self._tag is None:
            return
        proof = b""
        if prove_to:
            proof = self._proofs.make(prove_to, message_id, self._head)
            self.counters["proofs_made"] += 1
        self._send(to, messages.encode(RESPONSE, message_id, self._head, result, self.queue.take(), proof))

    def _send(self, to: Address, datagram: bytes) -> None:
        self.counters["datagrams_out"] += 1
        self.counters["bytes_out"] += len(datagram)
        assert self.transport is not None
        self.transport.send(to, datagram)

    # -- datagrams received --------------------------------------------------------------------------------------

    def datagram_received(self, data: bytes, addr: Address) -> None:
        """Decode, check and dispatch one datagram. Never raises; dropped datagrams are counted by reason."""
        self.counters["datagrams_in"] += 1
        if self._tag is None:
            self.counters["dropped_no_swarm"] += 1
            return
        try:
            message_id, message = messages.decode(data)
        except Malformed as error:
            self.counters[f"dropped_{error}"] += 1
            return
        if message.tag != self._tag:
            self.counters["dropped_other_swarm"] += 1
            return
        if (sealed_by := id_behind(addr)) and sealed_by != message.heartbeat.node_id:
            self.counters["dropped_in_anothers_name"] += 1
            return
        try:
            if message.heartbeat.node_id == self.own_id:
                self._accept_own_id(message_id, message, addr)
            elif isinstance(message, ResponseDatagram):
                self._accept_response(message_id, message, addr)
            else:
                self._accept_request(message_id, message, addr)
        except Exception as error:
            self._on_fault(error)

    def _accept_own_id(self, message_id: bytes, message: RequestDatagram | ResponseDatagram, source: Address) -> None:
        """A datagram of this node came back (several interfaces, a hairpin NAT), or the id is forged, or another
        process has the same key. Only that process can prove the id; this node proves it in turn, so that both detect
        it."""
        if self._heartbeat is None or message.heartbeat.boot_id == self._heartbeat.boot_id:
            self.counters["dropped_own_echo"] += 1
            return
        self.counters["dropped_own_id"] += 1
        if isinstance(message, RequestDatagram):
            if message.prove:
                self.respond(message_id, source, Pong(), prove_to=self.own_id)
            self._events.on_own_id(message.heartbeat, source)
            return
        pending = self._calls.get(message_id)
        if pending is None or pending.contact.node_id != self.own_id or not self._is_proven(message_id, message):
            return
        self._calls.settle(pending)
        self._events.on_own_id(message.heartbeat, source, proven=True)
        pending.on_result(message.body)

    def _is_proven(self, message_id: bytes, response: ResponseDatagram) -> bool:
        assert self._tag is not None
        head = messages.encode_head(self._tag, response.heartbeat)
        return self._proofs.holds(response.proof, response.heartbeat.node_id, self.own_id, message_id, head)

    def _accept_response(self, message_id: bytes, response: ResponseDatagram, source: Address) -> None:
        pending = self._calls.get(message_id)
        if pending is None:
            self._accept_late(message_id, response, source)
            return
        if pending.require_proof and not self._is_proven(message_id, response):
            # Not settled: a forger that guesses a message id must not displace the true response.
            self.counters["dropped_unproven"] += 1
            return
        self._calls.settle(pending)
        heartbeat = response.heartbeat
        if heartbeat.node_id != pending.contact.node_id:
            self.counters["impostors"] += 1
            self._events.on_id_mismatch(heartbeat, source, pending.contact, proven=pending.require_proof)
            pending.on_result(None)
            return
        rtt_s: float | None = None
        if pending.timed:
            rtt_s = self._clock.monotonic() - pending.sent_at(message_id)
            self.round_trips.observe(rtt_s)
        self._events.on_response(heartbeat, source, rtt_s, pending.contact, proven=pending.require_proof)
        self._process_gossip(response.news, heartbeat.node_id)
        pending.on_result(response.body)

    def _accept_late(self, message_id: bytes, response: ResponseDatagram, source: Address) -> None:
        """The call was given up too soon. Its round trip is measured, or the waits would stay too short."""
        pending, sent = self._calls.take_late(message_id)
        if pending is None or response.heartbeat.node_id != pending.contact.node_id:
            self.counters["dropped_unasked"] += 1
            return
        if pending.require_proof and not self._is_proven(message_id, response):
            self.counters["dropped_unproven"] += 1
            return
        self.counters["late_answers"] += 1
        rtt_s = self._clock.monotonic() - sent
        self.round_trips.observe(rtt_s)
        self._events.on_response(response.heartbeat, source, rtt_s, pending.contact, proven=pending.require_proof)

    def _accept_request(self, message_id: bytes, request: RequestDatagram, source: Address) -> None:
        heartbeat = request.heartbeat
        self._events.on_request(heartbeat, source)
        self._process_gossip(request.news, heartbeat.node_id)
        procedure = self._procedures.get(type(request.body))
        if procedure is None:
            self.counters["dropped_no_procedure"] += 1
            return
        result = procedure(request.body, heartbeat, source, message_id)
        if result is not None:
            self.respond(message_id, source, result, prove_to=heartbeat.node_id if request.prove else b"")

    def _process_gossip(self, news: list[Gossip], sender: bytes) -> None:
        for piece in news:
            self._events.on_gossip(piece, sender)

    def _guarded(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:
            self._on_fault(error)

    def _on_fault(self, error: Exception) -> None:
        """A bug in one handler must not stop the protocol. Called where every exception is caught."""
        if self.raise_handler_errors:
            raise error
        self.counters["faults"] += 1
        if self.counters["faults"] == 1:
            self._log.error("datagram_handler_failed", error=repr(error))


def _node_address(contact: Contact) -> NodeAddress:
    """Its address with its id: a sealed transport seals for the node, not for the address."""
    return NodeAddress.of(contact.address, contact.node_id)


class SwarmServer(Server):  # type: ignore[misc]
    """The package's server without storage: its node and its protocol behind a `Transport`."""

    protocol_class = SwarmProtocol

    def __init__(
        self,
        identity: Identity,
        settings: OverlaySettings,
        environment: Environment,
    ) -> None:
        super().__init__(settings.k, settings.alpha, identity.node_id)
        # The package's storage keeps every value for a week.
        self.storage: MappingProxyType[bytes, object] = MappingProxyType({})
        self.protocol: SwarmProtocol = self.protocol_class(
            self.node,
            settings.k,
            proofs=IdentityProofs(identity),
            environment=environment,
            ceiling_s=PROBE_TIMEOUT_S,
        )

    def attach(self, transport: Transport) -> None:
        """Send through an open transport; replaces `listen` of the package."""
        self.protocol.connection_made(transport)

    def stop(self) -> None:
        self.protocol.close()

    async def _not_kept(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError(
            "this overlay stores no values, and its transport listens; see p2pnode.overlay.overlay"
        )

    listen = bootstrap = get = set = set_digest = _not_kept
