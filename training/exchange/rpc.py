"""Requests of the exchange: the genesis, then a typed message; directly, or by way of another member.

A firewall, a clock that is off or another network can separate two members that others reach. SWIM asks a helper to
ping the silent one before it suspects it (Das et al. 2002); the exchange asks a helper to pass its requests on.

The relay names the sender, passes the body on as it comes, and the answer back. The receiver handles the request as a
direct one of the sender. Only what a member itself has sent is passed on: a request takes one relay at most, and cannot
go in a circle. The relay keeps nothing but the buffers under way. Deltas have identities, so one that arrives by both
ways is added once. A relay is believed about who sent a request: members are trusted not to lie.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import TypeVar

import msgspec

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.environment import Clock
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import (
    NOT_SERVED,
    Body,
    Buffer,
    ReceivedResponse,
    RequestRejected,
    Response,
    TransportError,
)
from p2pnode.training.cooperative import LoopTurns
from p2pnode.training.encoding.frames import BadFrame, FrameReader
from p2pnode.training.exchange.messages import Indirect, IndirectAnswer, decode, encode, read_record
from p2pnode.training.exchange.peer_score import PeerScore
from p2pnode.training.exchange.timeouts import AdaptiveTimeouts, Kind
from p2pnode.training.swarm import Swarm

OTHER_SWARM = "another swarm: the genesis differs"

A = TypeVar("A", bound=msgspec.Struct)
Handler = Callable[[Contact, bytes, AsyncIterator[Buffer]], Awaitable[Response]]
TypedHandler = Callable[[Contact, A, AsyncIterator[Buffer]], Awaitable[Response]]


class ExchangeRpc:
    """Sends and serves the requests of one node.

    A request goes to the node's present address. A claim of ownership names the one that the owner had then, and a node
    that was started again since may be at another. A node that does not answer directly is asked by way of a member
    that reaches it (`training.exchange.rpc`).
    """

    def __init__(self, *, swarm: Swarm, genesis: bytes, clock: Clock, score: PeerScore) -> None:
        """`score` hears who answers, and who sends nonsense."""
        #: For every pass over many values on the loop of this node.
        self.turns = LoopTurns()
        self.score = score
        self.genesis = genesis
        self.clock = clock
        self.timeouts = AdaptiveTimeouts()
        self._swarm = swarm
        self._handlers: dict[str, Handler] = {}
        self._indirect = IndirectRequests(swarm, self._dispatch)
        #: The requests under way to each node, or by way of it.
        self.under_way: dict[bytes, dict[_Request, None]] = {}

    @property
    def me(self) -> Contact:
        """Where other nodes reach this one."""
        return Contact(self._swarm.node_id, self._swarm.address)

    # -- requests of others -------------------------------------------------------------------------------------

    def register(self, name: str, kind: type[A], handle: TypedHandler[A], *, waits: bool = False) -> None:
        """Serve requests of this name, which carry messages of this type. `waits`: the handler may wait for an answer
        of another node."""

        async def handler(sender: Contact, payload: bytes, stream: AsyncIterator[Buffer]) -> Response:
            if not payload.startswith(self.genesis):
                # Its answers are refusals, and each would be followed by the next request.
                self.score.foreign(sender.node_id)
                raise RequestRejected(OTHER_SWARM)
            try:
                message = decode(memoryview(payload)[len(self.genesis) :], kind)
            except msgspec.DecodeError as error:
                self.score.nonsense(sender.node_id, "malformed")
                raise RequestRejected(f"malformed {kind.__name__}: {error}") from error
            try:
                return await handle(sender, message, stream)
            except BadFrame as error:
                raise RequestRejected(f"bad body: {error}") from error

        self._handlers[name] = handler
        self._swarm.register(name, handler, waits=waits)

    def answer(
        self,
        name: str,
        kind: type[A],
        handle: Callable[[Contact, A], Awaitable[msgspec.Struct]],
        *,
        waits: bool = False,
    ) -> None:
        """Serve requests of this name that have no body, and whose answers have none. `waits` as above."""

        async def respond(sender: Contact, message: A, _stream: AsyncIterator[Buffer]) -> Response:
            return Response(encode(await handle(sender, message)))

        self.register(name, kind, respond, waits=waits)

    def serve_indirect(self) -> None:
        """Serve requests that come by way of a relay, and relay those of others."""
        self._swarm.register(NAME, self._indirect.handle, waits=True)

    async def _dispatch(self, name: str, origin: Contact, payload: bytes, stream: AsyncIterator[Buffer]) -> Response:
        """Handle a request that a relay has passed on."""
        if (handler := self._handlers.get(name)) is None:
            raise RequestRejected(f"{NOT_SERVED} {name!r}")
        return await handler(origin, payload, stream)

    # -- own requests -------------------------------------------------------------------------------------------

    def request(
        self,
        kind: Kind,
        to: Contact,
        message: msgspec.Struct,
        body: Body = (),
        *,
        name: str = "",
        at_least_s: float = 0.0,
    ) -> AbstractAsyncContextManager[ReceivedResponse]:
        """A request with bodies, given up after a silence that depends on the response times measured so far, but of so
        many seconds at least. `name`: that of its handler; empty: the kind.

        The caller retries under the same identity. Raises `TransportError`.
        """
        name, to = name or kind, self._swarm.contact(to.node_id) or to
        timeout_s = max(at_least_s, self._timeout_s(kind, to.node_id))
        node, payload = self.score.relay(to.node_id), self.genesis + encode(message)
        if node and (relay := self._swarm.contact(node)) is not None:
            sent = self._indirect.request(relay, to, name, payload, body, timeout_s)
            return _Request(self, kind, to, sent, node)
        return _Request(self, kind, to, self._swarm.request(to, name, payload, body, timeout_s=timeout_s))

    def question(
        self, to: Contact, name: str, message: msgspec.Struct, at_least_s: float = 0.0, body: Body = ()
    ) -> AbstractAsyncContextManager[ReceivedResponse]:
        """A small request, which a living node answers at once. It is given up after a silence that this peer's
        answers to others make unlikely, but of so many seconds at least: where nothing else waits for the answer, it
        may come from behind a full line. Raises `TransportError`."""
        return self.request("question", to, message, body, name=name, at_least_s=at_least_s)

    async def ask(
        self, to: Contact, name: str, message: msgspec.Struct, kind: type[A], at_least_s: float = 0.0, body: Body = ()
    ) -> A:
        """A `question` whose answer has no body. Raises `TransportError`; a malformed answer counts as `foreign`."""
        async with self.question(to, name, message, at_least_s, body) as answer:
            return self.decoded(to, answer.head, kind)

    async def try_ask(self, to: Contact, name: str, message: msgspec.Struct, kind: type[A]) -> A | None:
        """`ask` where nothing follows from a failure: None."""
        try:
            return await self.ask(to, name, message, kind)
        except TransportError:
            return None

    async def failure(self, to: Contact, relay: Contact | None = None) -> TransportError | None:
        """Why a node does not answer a small question, directly or by way of a member; None: it answers."""
        return await self._indirect.failure(to, relay, self._timeout_s("question", (relay or to).node_id))

    def found_dead(self, node_id: bytes) -> None:
        """End the requests under way to a node: each raises `TransportError` where it waits."""
        # Promise 3 (docs/faults.md): a timeout may have become longer than the bound.
        for request in list(self.under_way.get(node_id, ())):
            request.end()

    def _timeout_s(self, kind: Kind, node: bytes) -> float:
        is_suspect = self._swarm.is_suspect(node) or self._swarm.is_gone(node)
        return self.timeouts.timeout_s(kind, node, is_suspect=is_suspect)

    def decoded(self, source: Contact, head: bytes, kind: type[A]) -> A:
        """The head of an answer as its message. Raises `TransportError` (`foreign`) when it is malformed."""
        try:
            return decode(head, kind)
        except msgspec.DecodeError as error:
            self.score.nonsense(source.node_id, "malformed")
            raise TransportError("foreign", source.address, f"gave a malformed answer: {error}") from error

    async def record(self, source: Contact, reader: FrameReader, shard: int, kind: type[A]) -> A:
        """A message in the body of an answer (`record_frames`). Raises `TransportError` as `decoded` does."""
        try:
            return await read_record(reader, shard, kind)
        except BadFrame as error:
            raise TransportError("foreign", source.address, f"gave a malformed answer: {error}") from error


class _Request:
    """One request: measured, and ended by `TransportError` (`reset`) as soon as its receiver is found dead. A class
    without `asyncio.timeout`, because nested generators and that cost each small request as much again."""

    __slots__ = ("_cancelling", "_has_ended", "_is_dead", "_kind", "_relay", "_rpc", "_sent", "_task", "_to")

    def __init__(
        self,
        rpc: ExchangeRpc,
        kind: Kind,
        to: Contact,
        sent: AbstractAsyncContextManager[ReceivedResponse],
        relay: bytes = b"",
    ) -> None:
        self._relay = relay
        self._rpc = rpc
        self._kind: Kind = kind
        self._to = to
        self._sent = sent
        self._is_dead = self._has_ended = False

    async def __aenter__(self) -> ReceivedResponse:
        rpc, node = self._rpc, self._to.node_id
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        rpc.under_way.setdefault(self._relay or node, {})[self] = None
        began_s = rpc.clock.monotonic()
        try:
            answer = await self._sent.__aenter__()
        except BaseException as error:
            self._on_end(error)
            raise
        # The time that the peer took, without the transfer of the body, which depends on the line and the body.
        took_s = rpc.clock.monotonic() - began_s if answer.waited_s is None else answer.waited_s
        rpc.timeouts.on_response(self._kind, node, took_s)
        rpc.score.answered(node, by_relay=bool(self._relay))
        return answer

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._sent.__aexit__(kind, error, trace)
        except BaseException as failure:
            self._on_end(failure)
            raise
        self._on_end(error)

    def end(self) -> None:
        """The receiver was found dead: raise where the request waits."""
        if self._task is asyncio.current_task():
            # It waits nowhere now, and may have ended by the time it waits again: a cancellation would strike there.
            asyncio.get_running_loop().call_soon(self.end)
        elif not (self._is_dead or self._has_ended):
            self._is_dead = True
            self._task.cancel()

    def _on_end(self, error: BaseException | None) -> None:
        """The request has ended, by an error or without. As `asyncio.timeout` does it, a cancellation by `end` is told
        from one by others."""
        self._has_ended = True
        under_way, via = self._rpc.under_way, self._relay or self._to.node_id
        del under_way[via][self]
        if not under_way[via]:
            del under_way[via]
        if self._is_dead and self._task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError):
            raise TransportError("reset", self._to.address, "was found dead while it was asked") from error
        if not isinstance(error, TransportError):
            return
        score, node = self._rpc.score, self._to.node_id
        if error.kind == "rejected":
            score.answered(node, by_relay=bool(self._relay))
        elif error.kind != "closed":
            score.failed(self._to, error.detail, self._relay)
        if error.kind == "timeout":
            self._rpc.timeouts.on_timeout(self._kind, node)


NAME = "indirect"
#: An answer by way of a relay takes this much longer: the relay's own wait ends first, and its reason arrives.
RELAY_S = 1.0
#: Bytes of a question whether a member is reached, and of its answer: more than one packet, which a path may lose.
QUESTION_BYTES = 2048
#: Characters of a reason that a relay passes on.
MAX_DETAIL = 200

#: Handles a request of this name that another member has passed on.
Dispatch = Callable[[str, Contact, bytes, AsyncIterator[Buffer]], Awaitable[Response]]


class IndirectRequests:
    """The two ends and the middle of indirect requests at one node. `dispatch` handles those for this node."""

    def __init__(self, swarm: Swarm, dispatch: Dispatch) -> None:
        self._swarm = swarm
        self._dispatch = dispatch

    @asynccontextmanager
    async def request(
        self, relay: Contact, to: Contact, name: str, payload: bytes, body: Body, timeout_s: float
    ) -> AsyncIterator[ReceivedResponse]:
        """Send a request by way of `relay`. Raises `TransportError` about `to`."""
        message = self._message(to, name, payload, timeout_s)
        sent = self._swarm.request(relay, NAME, encode(message), body, timeout_s=timeout_s + RELAY_S)
        asked = f"was asked by way of {relay.address}, which"
        async with AsyncExitStack() as stack:
            try:
                answer = await stack.enter_async_context(sent)
                found = decode(answer.head, IndirectAnswer)
            except TransportError as error:
                raise TransportError(error.kind, to.address, f"{asked} {error.detail}") from error
            except msgspec.DecodeError as error:
                raise TransportError("foreign", to.address, f"{asked} gave a malformed answer: {error}") from error
            if found.failure is not None:
                await stack.aclose()  # the relay has answered: its connection is kept
                raise TransportError(found.failure, to.address, found.detail)
            yield ReceivedResponse(found.payload, answer.body, waited_s=answer.waited_s)

    async def failure(self, to: Contact, relay: Contact | None, timeout_s: float) -> TransportError | None:
        """Why a member does not answer directly, or by way of `relay`; None: it answers."""
        question = bytes(QUESTION_BYTES)
        if relay is None:
            me = Contact(self._swarm.node_id, self._swarm.address)
            asked = encode(_sent_by(me, self._message(to, "", question, timeout_s)))
            sent = self._swarm.request(to, NAME, asked, timeout_s=timeout_s)
        else:
            sent = self.request(relay, to, "", question, (), timeout_s)
        try:
            async with sent:
                return None
        except TransportError as error:
            has_answered = relay is None and error.kind == "rejected"
            return None if has_answered else error

    def _message(self, to: Contact, name: str, payload: bytes, timeout_s: float) -> Indirect:
        host, port = to.address.host, to.address.port
        return Indirect(to.node_id, host, port, name, round(1000 * timeout_s), payload)

    # -- requests of others -------------------------------------------------------------------------------------

    async def handle(self, sender: Contact, payload: bytes, stream: AsyncIterator[Buffer]) -> Response:
        """Pass a request on, or handle it if it is for this node. Raises `RequestRejected`."""
        try:
            message = decode(payload, Indirect)
            if message.target == self._swarm.node_id:
                return await self._for_this_node(message, stream)
            to = Contact(message.target, Address.checked(message.host, message.port))
        except (msgspec.DecodeError, ValueError) as error:
            raise RequestRejected(f"malformed Indirect: {error}") from error
        if message.origin:
            raise RequestRejected("this request was passed on already")
        return await self._pass_on(self._swarm.contact(to.node_id) or to, _sent_by(sender, message), stream)

    async def _for_this_node(self, message: Indirect, stream: AsyncIterator[Buffer]) -> Response:
        if not message.name:
            return Response(encode(IndirectAnswer(message.payload)))
        origin = Contact(message.origin, Address.checked(message.origin_host, message.origin_port))
        reply = await self._dispatch(message.name, origin, message.payload, stream)
        return Response(encode(IndirectAnswer(reply.head)), reply.body)

    async def _pass_on(self, to: Contact, message: Indirect, stream: AsyncIterator[Buffer]) -> Response:
        sent = self._swarm.request(to, NAME, encode(message), stream, timeout_s=message.timeout_ms / 1000.0)
        try:
            answer = await sent.__aenter__()
        except TransportError as error:
            return Response(encode(IndirectAnswer(failure=error.kind, detail=error.detail[:MAX_DETAIL])))
        return Response(answer.head, _Passed(sent, answer.body))


def _sent_by(sender: Contact, message: Indirect) -> Indirect:
    host, port = sender.address.host, sender.address.port
    return msgspec.structs.replace(message, origin=sender.node_id, origin_host=host, origin_port=port)


class _Passed:
    """The body of an answer on its way through a relay; closing it ends the relay's own request."""

    def __init__(self, sent: AbstractAsyncContextManager[ReceivedResponse], body: AsyncIterator[Buffer]) -> None:
        self._sent: AbstractAsyncContextManager[ReceivedResponse] | None = sent
        self._body = body

    def __aiter__(self) -> _Passed:
        return self

    async def __anext__(self) -> Buffer:
        return await anext(self._body)

    async def aclose(self) -> None:
        sent, self._sent = self._sent, None
        if sent is not None:
            await sent.__aexit__(None, None, None)
