"""Requests between the nodes of a swarm, over streams; an envelope surrounds the payload in both directions.

The envelope carries the swarm's tag, the sender's heartbeat and the id of the node that should answer. A request that
reaches another swarm or another node is refused before its handler runs. What streams show about a peer is told to
the membership.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import lru_cache
from types import TracebackType
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pnode.overlay.addresses import Address, NodeAddress, group_of, id_behind, usable_host
from p2pnode.overlay.environment import Clock
from p2pnode.overlay.ids import ID_BYTES, short
from p2pnode.overlay.kademlia.messages import TAG_BYTES
from p2pnode.overlay.local_node import LocalNode
from p2pnode.overlay.membership.service import Membership
from p2pnode.overlay.peers import Contact, Heartbeat
from p2pnode.overlay.rate_limits import RateLimit, RateLimiter
from p2pnode.overlay.transport import (
    NOT_SERVED,
    Body,
    Buffer,
    ReceivedResponse,
    Request,
    RequestRejected,
    RequestStream,
    Response,
    Transport,
    TransportError,
    shows_movement,
)

Handler = Callable[[Contact, bytes, AsyncIterator[Buffer]], Awaitable[Response]]
#: A request of the transport.
Sent = AbstractAsyncContextManager[ReceivedResponse]
#: A handler of a request that carries no envelope (`hello`).
BareHandler = Callable[[Request], Awaitable[Response]]

#: Requests without an envelope, of one address: answering `hello` costs a signature.
BARE_REQUEST_RATE = RateLimit(50.0, 200.0)
#: A request beyond the rate is refused after this delay, which slows its sender down.
RATE_LIMIT_DELAY_S = 1.0
#: A longer version is no envelope; a later version of p2pnode may have one longer than those shown today.
MAX_VERSION_CHARACTERS = 64


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """Head of every request and response but `hello`. `to` is the expected node id; empty in responses.

    `capacity` is the sender's capacity class (`overlay.line.capacity`), 0 where it is not known. `version` is what the
    sender says that it runs: untrusted text that peers show (`overlay.peers.shown_version`). Both may be left out,
    and later versions may append elements.
    """

    tag: Annotated[bytes, Meta(min_length=TAG_BYTES, max_length=TAG_BYTES)]
    heartbeat: Heartbeat
    to: Annotated[bytes, Meta(max_length=ID_BYTES)]
    payload: bytes
    capacity: Annotated[int, Meta(ge=0, le=255)] = 0
    version: Annotated[str, Meta(max_length=MAX_VERSION_CHARACTERS)] = ""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Envelope)


def encoded_envelope(local: LocalNode, to: bytes, payload: bytes) -> bytes:
    """The envelope of a payload, encoded."""
    return _ENCODER.encode((local.tag, local.heartbeat, to, payload, local.line.capacity, local.version))


def decoded_envelope(head: bytes) -> Envelope | None:
    """The envelope in the head of a request or response; None for bytes that are none."""
    try:
        return _DECODER.decode(head)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


class RequestService:
    """Serves the requests of other nodes by name, and sends requests to them."""

    def __init__(
        self,
        local: LocalNode,
        transport: Transport,
        membership: Membership,
        clock: Clock,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.membership = membership
        self._local = local
        self._transport = transport
        self._clock = clock
        self._handlers: dict[str, Handler] = {}
        self._waiting: dict[str, None] = {}
        self._bare_handlers: dict[str, BareHandler] = {}
        self._bare_rates: RateLimiter[str] = RateLimiter(BARE_REQUEST_RATE)

    def register(self, name: str, handler: Handler, *, waits: bool = False) -> None:
        """Serve requests of this name; a second registration replaces the first. `waits`: the handler may wait for an
        answer of another node. Such requests never take all places, so that those which wait for nobody are served."""
        self._handlers[name] = handler
        if waits:
            self._waiting[name] = None

    def waits(self, name: str) -> bool:
        """Whether a request of this name may wait for another node."""
        return name in self._waiting

    def register_bare(self, name: str, handler: BareHandler) -> None:
        """Serve requests of this name without an envelope, from unauthenticated peers too."""
        self._bare_handlers[name] = handler

    async def serve(self, incoming: Request) -> Response:
        """Answer one request. Raises `RequestRejected` with the reason."""
        self.counters["requests_in"] += 1
        bare = self._bare_handlers.get(incoming.name)
        if bare is not None:
            group = group_of(incoming.source.host)
            if group and self._bare_rates.take(group, self._clock.monotonic()):
                # Promise 8 (docs/faults.md): strangers cannot stop training.
                self.counters["refused_rate"] += 1
                await asyncio.sleep(RATE_LIMIT_DELAY_S)
                raise RequestRejected("you ask more often in a second than a stranger may; try again later")
            return await bare(incoming)
        local = self._local
        if local.tag is None:
            raise self._refused("no_swarm", "this node has not joined a swarm yet")
        envelope = decoded_envelope(incoming.head)
        if envelope is None:
            text = "the head of this request is not an envelope; does the sender run another version of p2pnode?"
            raise self._refused("content", text)
        if envelope.tag != local.tag:
            raise self._refused("other_swarm", "this node belongs to another swarm")
        if envelope.to != local.node_id:
            text = f"this is {short(local.node_id)}, not {short(envelope.to)}"
            raise self._refused("other_node", text)
        heartbeat, source = envelope.heartbeat, incoming.source
        sender = heartbeat.node_id
        if (proven := id_behind(source)) and proven != sender:
            raise self._refused("anothers_name", f"{short(proven)} uses the id of {short(sender)}")
        self.membership.members.on_stream_request(heartbeat, Address(source.host, heartbeat.port), incoming.stream)
        self._note(envelope)
        if sender == local.node_id:
            raise self._refused("own_id", f"{short(local.node_id)} is this node's own id: another process uses its key")
        handler = self._handlers.get(incoming.name)
        if handler is None:
            raise self._refused("no_handler", f"{NOT_SERVED} {incoming.name!r}")
        contact = Contact(sender, Address(usable_host(heartbeat.host) or source.host, heartbeat.port))
        reply = await handler(contact, envelope.payload, incoming.body)
        return Response(encoded_envelope(local, b"", reply.head), reply.body)

    def _note(self, envelope: Envelope) -> None:
        """What a peer said of itself beside its heartbeat."""
        peers, node_id = self.membership.members.peers, envelope.heartbeat.node_id
        if envelope.capacity:
            peers.note_capacity(node_id, envelope.capacity)
        if envelope.version:
            peers.note_version(node_id, envelope.version)

    def _refused(self, reason: str, text: str) -> RequestRejected:
        self.counters[f"requests_refused_{reason}"] += 1
        return RequestRejected(text)

    def request(
        self, to: Contact, name: str, payload: bytes, body: Body = (), *, timeout_s: float, keep: bool = True
    ) -> AbstractAsyncContextManager[ReceivedResponse]:
        """Send a request; see `Transport.request`. A response from another node is a `TransportError` (rejected)."""
        return _Outgoing(self, to, name, payload, body, timeout_s, keep=keep)

    def start(self, to: Contact, name: str, payload: bytes, body: Body, timeout_s: float, keep: bool) -> Sent:
        """The request of the transport. Raises `TransportError`."""
        local = self._local
        if local.tag is None:
            raise TransportError("closed", to.address, "this node has not joined a swarm yet")
        if not self.membership.members.takes_streams(to.node_id):
            self.counters["requests_not_made_nat"] += 1
            raise TransportError("refused", to.address, "is behind a NAT that accepts no incoming connections")
        head = encoded_envelope(local, to.node_id, payload)
        self.counters["requests_out"] += 1
        target = _node_address(to.address, to.node_id)
        return self._transport.request(target, name, head, body, timeout_s=timeout_s, keep=keep)

    def opened(self, to: Contact, answer: ReceivedResponse) -> ReceivedResponse:
        """A response without its envelope. Raises `TransportError`."""
        envelope = decoded_envelope(answer.head)
        if envelope is None or envelope.tag != self._local.tag:
            raise TransportError("foreign", to.address, "answered, but not as a node of this swarm")
        if envelope.heartbeat.node_id != to.node_id:
            detail = f"answered as {short(envelope.heartbeat.node_id)}, not as {short(to.node_id)}"
            raise TransportError("rejected", to.address, detail)
        self.membership.on_stream_response(envelope.heartbeat, to.address)
        self._note(envelope)
        return ReceivedResponse(envelope.payload, answer.body, waited_s=answer.waited_s)

    def on_error(self, to: Contact, error: TransportError) -> None:
        """Count what became of a request, and have its receiver probed."""
        if error.address == to.address:
            self.counters[f"requests_{error.kind}"] += 1
            if error.kind in ("refused", "timeout", "reset"):
                self.membership.on_stream_failure(to, str(error))


class _Outgoing:
    """One request of `RequestService.request`. A class, because a generator costs each small request as much again."""

    __slots__ = ("_arguments", "_sent", "_service", "_stream", "_to")

    def __init__(
        self,
        service: RequestService,
        to: Contact,
        name: str,
        payload: bytes,
        body: Body,
        timeout_s: float,
        *,
        keep: bool,
    ) -> None:
        self._service = service
        self._to = to
        self._arguments = name, payload, body, timeout_s, keep
        self._sent: Sent | None = None
        #: The same, if the transport shows its stream.
        self._stream: RequestStream | None = None

    async def __aenter__(self) -> ReceivedResponse:
        service, to = self._service, self._to
        outgoing = service.start(to, *self._arguments)
        if shows_movement(outgoing):
            self._stream = outgoing
            service.membership.members.movement.begin(to.node_id, outgoing)
        try:
            answer = await outgoing.__aenter__()
        except BaseException as error:
            if self._stream is not None:
                service.membership.members.movement.end(to.node_id, self._stream)
            if isinstance(error, TransportError):
                service.on_error(to, error)
            raise
        self._sent = outgoing
        try:
            return service.opened(to, answer)
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._sent is not None
        try:
            await self._sent.__aexit__(kind, error, trace)
        finally:
            if self._stream is not None:
                self._service.membership.members.movement.end(self._to.node_id, self._stream)
            if isinstance(error, TransportError):
                self._service.on_error(self._to, error)


@lru_cache(maxsize=1024)
def _node_address(address: Address, node_id: bytes) -> NodeAddress:
    """Each request needs it."""
    return NodeAddress.of(address, node_id)
