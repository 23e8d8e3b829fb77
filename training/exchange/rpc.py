"""Requests of the exchange: the genesis, then a typed message; adaptive timeouts, and handlers that check both.

A timeout bounds silence, not the transfer: a slow link that delivers bytes is waited for, and a response time begins
when the peer has the request. It follows the response times of that peer for that kind of request (`overlay.waits`),
between a floor and a ceiling. After a timeout the next one is longer (RFC 6298 section 5.5): the peer, or the queue
before a slow line, may have become slower than any measurement. It stays longer until answers come that a shorter one
would have got. So the ceiling bounds the first silence, by which a dead node is found, and no longer one for a peer
that is suspected or dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Literal, NamedTuple, TypeVar

import msgspec

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
from p2pnode.overlay.waits import RoundTrips
from p2pnode.training.cooperative import LoopTurns
from p2pnode.training.encoding.frames import BadFrame, FrameReader
from p2pnode.training.exchange.indirect import NAME, IndirectRequests
from p2pnode.training.exchange.messages import decode, encode, read_record
from p2pnode.training.exchange.peer_score import PeerScore
from p2pnode.training.swarm import Swarm

Kind = Literal["push", "pull", "forward", "state", "fetch", "request_repair", "repair", "question"]

#: Pairs of kind and peer kept; the one that was used longest ago is dropped.
MAX_KEYS = 1024
#: Each timeout in a row makes the next one longer by this factor, up to this one in all.
BACKOFF, MAX_BACKOFF = 1.5, 8.0


class Range(NamedTuple):
    """Seconds: before anything is measured, at least, and at most."""

    first_s: float
    floor_s: float
    ceiling_s: float


#: With this ceiling detection, take-over and first answer stay within the detection bound of 10 s.
REQUEST = Range(3.0, 2.0, 4.5)
#: Below the floor of every request: an owner that waits for its backup answers `retry` before its callers time out.
FORWARD = Range(1.5, 0.75, 1.75)
#: A small question that is answered at once. Behind a full line its answer takes as long as the queues are.
QUESTION = Range(1.0, 1.0, 4.5)

_LIMITS: dict[Kind, Range] = {"forward": FORWARD, "question": QUESTION}


class _Times(RoundTrips):
    """The response times of one peer to one kind of request."""

    __slots__ = ("backoff",)

    def __init__(self) -> None:
        super().__init__()
        self.backoff = 1.0

    def within(self, limits: Range) -> float:
        """The timeout without the silences of late."""
        return min(max(limits.floor_s, self.timeout_s(limits.first_s)), limits.ceiling_s)


class AdaptiveTimeouts:
    """The timeouts of the requests of one node."""

    def __init__(self) -> None:
        self._times: dict[tuple[Kind, bytes], _Times] = {}

    def timeout_s(self, kind: Kind, peer: bytes, *, is_suspect: bool = False) -> float:
        """Seconds of silence after which a request of this kind to this peer has failed. One that the failure detector
        suspects or has found dead is about to be replaced."""
        limits, times = _LIMITS.get(kind, REQUEST), self._times.get((kind, peer))
        if times is None:
            return limits.first_s
        seconds = times.within(limits) * times.backoff
        # Promise 3: nobody waits for a suspect as long as for others.
        return min(seconds, limits.ceiling_s) if is_suspect else seconds

    def on_response(self, kind: Kind, peer: bytes, seconds: float) -> None:
        """The answer began so many seconds after the last byte of the request had arrived."""
        times = self._of(kind, peer)
        if seconds <= times.within(_LIMITS.get(kind, REQUEST)):
            times.backoff = max(1.0, times.backoff / BACKOFF)
        times.observe(seconds)

    def on_timeout(self, kind: Kind, peer: bytes) -> None:
        """The timeout passed without an answer."""
        times = self._of(kind, peer)
        times.backoff = min(times.backoff * BACKOFF, MAX_BACKOFF)

    def _of(self, kind: Kind, peer: bytes) -> _Times:
        key = kind, peer
        times = self._times[key] = self._times.pop(key) if key in self._times else _Times()
        if len(self._times) > MAX_KEYS:
            del self._times[next(iter(self._times))]
        return times


OTHER_SWARM = "another swarm: the genesis differs"

A = TypeVar("A", bound=msgspec.Struct)
Handler = Callable[[Contact, bytes, AsyncIterator[Buffer]], Awaitable[Response]]
TypedHandler = Callable[[Contact, A, AsyncIterator[Buffer]], Awaitable[Response]]


class ExchangeRpc:
    """Sends and serves the requests of one node.

    A request goes to the node's present address. A claim of ownership names the one that the owner had then, and a node
    that was started again since may be at another. A node that does not answer directly is asked by way of a member
    that reaches it (`training.exchange.indirect`).
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
        self, kind: Kind, to: Contact, message: msgspec.Struct, body: Body = ()
    ) -> AbstractAsyncContextManager[ReceivedResponse]:
        """A request with bodies, given up after a silence that depends on the response times measured so far.

        The caller retries under the same identity. Raises `TransportError`.
        """
        return self._send(kind, to, kind, message, body)

    def question(
        self, to: Contact, name: str, message: msgspec.Struct, timeout_s: float, body: Body = ()
    ) -> AbstractAsyncContextManager[ReceivedResponse]:
        """A request that is given up after a silence of `timeout_s`, or of more where this peer was slow before: on a
        full line a small question waits for seconds behind everything else. Raises `TransportError`."""
        return self._send("question", to, name, message, body, timeout_s)

    def _send(
        self, kind: Kind, to: Contact, name: str, message: msgspec.Struct, body: Body, at_least_s: float = 0.0
    ) -> _Request:
        to = self._swarm.contact(to.node_id) or to
        timeout_s = max(at_least_s, self._timeout_s(kind, to.node_id))
        node, payload = self.score.relay(to.node_id), self.genesis + encode(message)
        if node and (relay := self._swarm.contact(node)) is not None:
            sent = self._indirect.request(relay, to, name, payload, body, timeout_s)
            return _Request(self, kind, to, sent, node)
        return _Request(self, kind, to, self._swarm.request(to, name, payload, body, timeout_s=timeout_s))

    async def ask(
        self, to: Contact, name: str, message: msgspec.Struct, kind: type[A], timeout_s: float, body: Body = ()
    ) -> A:
        """A `question` whose answer has no body. Raises `TransportError`; a malformed answer counts as `foreign`."""
        async with self.question(to, name, message, timeout_s, body) as answer:
            return self.decoded(to, answer.head, kind)

    async def try_ask(
        self, to: Contact, name: str, message: msgspec.Struct, kind: type[A], timeout_s: float
    ) -> A | None:
        """`ask` where nothing follows from a failure: None."""
        try:
            return await self.ask(to, name, message, kind, timeout_s)
        except TransportError:
            return None

    async def failure(self, to: Contact, relay: Contact | None = None) -> TransportError | None:
        """Why a node does not answer a small question, directly or by way of a member; None: it answers."""
        return await self._indirect.failure(to, relay, self._timeout_s("question", (relay or to).node_id))

    def found_dead(self, node_id: bytes) -> None:
        """End the requests under way to a node: each raises `TransportError` where it waits."""
        # Promise 3: a timeout may have become longer than the bound.
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
