"""Requests of the exchange: typed messages, adaptive timeouts, and handlers that check the genesis.

A timeout is the median response time plus four median absolute deviations, between a floor and a ceiling. It bounds
silence, not the transfer: a slow link that delivers bytes is waited for, and a response time begins when the peer has
the request. Response times are measured per kind of request and per peer, so that one slow peer delays no other. For a
peer without measurements those of all peers count. After a timeout the next one is longer (RFC 6298 section 5.5): the
peer, or the queue before a slow line, may have become slower than any measurement. So the ceiling bounds the first
silence, by which a dead node is found. A peer that did answer after more, twice, on later attempts, is given as long
from then on: without that, every other request to it would fail.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from statistics import median
from types import TracebackType
from typing import Literal, NamedTuple, TypeVar

import msgspec

from overlay.environment import Clock
from overlay.peers import Contact
from overlay.transport import NOT_SERVED, Body, Buffer, ReceivedResponse, RequestRejected, Response, TransportError
from training.cooperative import LoopTurns
from training.encoding.frames import BadFrame, FrameReader
from training.exchange.indirect import NAME, IndirectRequests
from training.exchange.messages import decode, encode, read_record
from training.exchange.peer_score import PeerScore
from training.swarm import Swarm

Kind = Literal["push", "pull", "forward", "state", "fetch", "seek", "mend", "question"]

#: Response times kept per kind and peer, and how many are needed for an estimate.
MAX_MEASUREMENTS, MIN_MEASUREMENTS = 16, 4
#: Pairs of kind and peer kept; the one with the oldest answer is dropped.
MAX_KEYS = 1024
DEVIATIONS = 4.0
#: Each timeout in a row makes the next one longer by this factor, up to this one in all.
BACKOFF, MAX_BACKOFF = 1.5, 8.0
#: A peer is given so many times its second longest response time of late, whatever the ceiling.
ABOVE_LONGEST = 1.5


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
#: A timeout up to this is the same for a peer that the failure detector suspects.
LOWEST_CEILING_S = min(limits.ceiling_s for limits in (REQUEST, FORWARD, QUESTION))


class AdaptiveTimeouts:
    """The response times of the peers of one node."""

    def __init__(self) -> None:
        self._measured: dict[tuple[Kind, bytes], deque[float]] = {}
        self._of_kind: dict[Kind, deque[float]] = {}
        self._backed_off: dict[tuple[Kind, bytes], float] = {}

    def timeout_s(self, kind: Kind, peer: bytes, *, is_suspect: bool = False) -> float:
        """Seconds of silence after which a request of this kind to this peer has failed; for one that the failure
        detector suspects or has found dead no more than the ceiling, because it is about to be replaced."""
        limits = _LIMITS.get(kind, REQUEST)
        own = self._measured.get((kind, peer), ())
        seen = own if len(own) >= MIN_MEASUREMENTS else self._of_kind.get(kind, ())
        wanted_s = limits.first_s
        if len(seen) >= MIN_MEASUREMENTS:
            # No deviation is longer than the longest time: of quick answers the estimate is below the floor anyway.
            wanted_s = limits.floor_s
            if (1.0 + DEVIATIONS) * max(seen) > limits.floor_s:
                middle_s = median(seen)
                wanted_s = middle_s + DEVIATIONS * median(abs(seconds - middle_s) for seconds in seen)
        wanted_s = min(max(limits.floor_s, wanted_s), limits.ceiling_s)
        if len(own) > 1 and max(own) > limits.ceiling_s and (longest_s := sorted(own)[-2]) > limits.ceiling_s:
            wanted_s = ABOVE_LONGEST * longest_s
        wanted_s *= self._backed_off.get((kind, peer), 1.0)
        return min(wanted_s, limits.ceiling_s) if is_suspect else wanted_s

    def on_response(self, kind: Kind, peer: bytes, seconds: float) -> None:
        """The answer began so many seconds after the last byte of the request had arrived."""
        key = (kind, peer)
        own = self._measured.pop(key, None) or deque(maxlen=MAX_MEASUREMENTS)
        own.append(seconds)
        self._measured[key] = own
        self._of_kind.setdefault(kind, deque(maxlen=4 * MAX_MEASUREMENTS)).append(seconds)
        self._backed_off.pop(key, None)
        while len(self._measured) > MAX_KEYS:
            del self._measured[next(iter(self._measured))]

    def on_timeout(self, kind: Kind, peer: bytes) -> None:
        """The timeout passed without an answer."""
        key = (kind, peer)
        self._backed_off[key] = min(self._backed_off.pop(key, 1.0) * BACKOFF, MAX_BACKOFF)
        while len(self._backed_off) > MAX_KEYS:
            del self._backed_off[next(iter(self._backed_off))]


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

    def __init__(
        self,
        swarm: Swarm,
        genesis: bytes,
        clock: Clock,
        score: PeerScore | None = None,
    ) -> None:
        """`score` hears who answers, and who sends nonsense."""
        #: For every pass over many values on the loop of this node.
        self.turns = LoopTurns()
        self._score = PeerScore(clock) if score is None else score
        self._swarm = swarm
        self._genesis = genesis
        self._clock = clock
        self.timeouts = AdaptiveTimeouts()
        self._handlers: dict[str, Handler] = {}
        self._indirect = IndirectRequests(swarm, self._dispatch)
        #: The requests in flight of each node.
        self._in_flight: dict[bytes, dict[_Request, None]] = {}

    def register(self, name: str, kind: type[A], handle: TypedHandler[A], *, waits: bool = False) -> None:
        """Serve requests of this name, which carry messages of this type. `waits`: the handler may wait for an answer
        of another node."""
        handler = self._handlers[name] = self._checked(kind, handle)
        self._swarm.register(name, handler, waits=waits)

    def serve_indirect(self) -> None:
        """Serve requests that come by way of a relay, and relay those of others."""
        self._swarm.register(NAME, self._on_indirect, waits=True)

    async def _on_indirect(self, sender: Contact, payload: bytes, stream: AsyncIterator[Buffer]) -> Response:
        return await self._indirect.handle(sender, payload, stream)

    async def _dispatch(self, name: str, origin: Contact, payload: bytes, stream: AsyncIterator[Buffer]) -> Response:
        """Handle a request that a relay has passed on."""
        if (handler := self._handlers.get(name)) is None:
            raise RequestRejected(f"{NOT_SERVED} {name!r}")
        return await handler(origin, payload, stream)

    def _checked(self, kind: type[A], handle: TypedHandler[A]) -> Handler:
        """A request handler that decodes its message and rejects those of another genesis."""

        async def handler(sender: Contact, payload: bytes, stream: AsyncIterator[Buffer]) -> Response:
            try:
                message = decode(payload, kind)
            except msgspec.DecodeError as error:
                self._score.nonsense(sender.node_id)
                raise RequestRejected(f"malformed {kind.__name__}: {error}") from error
            if message.genesis != self._genesis:  # type: ignore[attr-defined]
                # Its answers are refusals, and each would be followed by the next request.
                self._score.foreign(sender.node_id)
                raise RequestRejected(OTHER_SWARM)
            try:
                return await handle(sender, message, stream)
            except BadFrame as error:
                raise RequestRejected(f"bad body: {error}") from error

        return handler

    async def ask(
        self, to: Contact, name: str, message: msgspec.Struct, kind: type[A], timeout_s: float, body: Body = ()
    ) -> A:
        """A `question` whose answer has no body. Raises `TransportError`; a malformed answer counts as `foreign`."""
        async with self.question(to, name, message, timeout_s, body) as answer:
            return self.decoded(to, answer.head, kind)

    def question(
        self, to: Contact, name: str, message: msgspec.Struct, timeout_s: float, body: Body = ()
    ) -> AbstractAsyncContextManager[ReceivedResponse]:
        """A request that is given up after a silence of `timeout_s`, or of more where this peer was slow before: on a
        full line a small question waits for seconds behind everything else. Raises `TransportError`."""
        to = self._swarm.contact(to.node_id) or to
        limit_s = max(timeout_s, self._timeout_s("question", to))
        return self._send("question", to, name, message, body, limit_s)

    def request(
        self, kind: Kind, to: Contact, message: msgspec.Struct, body: Body = ()
    ) -> AbstractAsyncContextManager[ReceivedResponse]:
        """A request with bodies, given up after a silence that depends on the response times measured so far.

        The caller retries under the same identity. Raises `TransportError`.
        """
        to = self._swarm.contact(to.node_id) or to
        return self._send(kind, to, kind, message, body, self._timeout_s(kind, to))

    def _send(
        self, kind: Kind, to: Contact, name: str, message: msgspec.Struct, body: Body, timeout_s: float
    ) -> _Request:
        node = self._score.routes.relay(to.node_id)
        if node and (relay := self._swarm.contact(node)) is not None:
            sent = self._indirect.request(relay, to, name, encode(message), body, timeout_s)
            return _Request(self, kind, to, sent, node)
        return _Request(self, kind, to, self._swarm.request(to, name, encode(message), body, timeout_s=timeout_s))

    async def failure(self, to: Contact, relay: Contact | None = None) -> TransportError | None:
        """Why a node does not answer a small question, directly or by way of a member; None: it answers."""
        return await self._indirect.failure(to, relay, self._timeout_s("question", relay or to))

    def found_dead(self, node_id: bytes) -> None:
        """End the requests in flight to a node: each raises `TransportError` where it waits."""
        for request in list(self._in_flight.get(node_id, ())):
            request.end()

    def began(self, node: bytes, request: _Request) -> float:
        """A request to a node, or by way of it, is under way until `ended`, or until the node is found dead. Returns
        since when."""
        self._in_flight.setdefault(node, {})[request] = None
        return self._clock.monotonic()

    def ended(self, node: bytes, request: _Request) -> None:
        """The request is under way no more."""
        requests = self._in_flight[node]
        del requests[request]
        if not requests:
            del self._in_flight[node]

    def responded(self, kind: Kind, to: Contact, began_s: float, answer: ReceivedResponse, relay: bytes) -> None:
        """Count how long a request waited for its response: the time that the peer took, without the transfer of the
        body, which depends on the line and the body."""
        now_s = self._clock.monotonic()
        if not relay:
            self._score.routes.reached(to.node_id)
        took_s = now_s - began_s if answer.waited_s is None else answer.waited_s
        self.timeouts.on_response(kind, to.node_id, took_s)
        self._score.answered(to.node_id)

    def failed(self, kind: Kind, to: Contact, error: TransportError, relay: bytes) -> None:
        """Count a request's timeout, and note that it did not reach the peer."""
        if error.kind not in ("rejected", "closed"):
            routes, now_s = self._score.routes, self._clock.monotonic()
            routes.failed(to.node_id, to.address, error.detail, now_s, relay)
        if error.kind == "timeout":
            self.timeouts.on_timeout(kind, to.node_id)
            self._score.unanswered(to.node_id)
        elif error.kind == "rejected":
            self._score.answered(to.node_id)

    def _timeout_s(self, kind: Kind, to: Contact) -> float:
        seconds = self.timeouts.timeout_s(kind, to.node_id)
        if seconds > LOWEST_CEILING_S:
            is_suspect = self._swarm.is_suspect(to.node_id) or self._swarm.is_gone(to.node_id)
            return self.timeouts.timeout_s(kind, to.node_id, is_suspect=is_suspect)
        return seconds

    def decoded(self, source: Contact, head: bytes, kind: type[A]) -> A:
        """The head of an answer as its message. Raises `TransportError` (`foreign`) when it is malformed."""
        try:
            return decode(head, kind)
        except msgspec.DecodeError as error:
            self._score.nonsense(source.node_id)
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
        rpc = self._rpc
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        began_s = rpc.began(self._relay or self._to.node_id, self)
        try:
            answer = await self._sent.__aenter__()
        except BaseException as error:
            self._on_end(error)
            raise
        rpc.responded(self._kind, self._to, began_s, answer, self._relay)
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
        self._rpc.ended(self._relay or self._to.node_id, self)
        if self._is_dead and self._task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError):
            raise TransportError("reset", self._to.address, "was found dead while it was asked") from error
        if isinstance(error, TransportError):
            self._rpc.failed(self._kind, self._to, error, self._relay)
