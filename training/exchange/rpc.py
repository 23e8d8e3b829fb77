"""Requests of the exchange: typed messages, adaptive timeouts, and handlers that check the genesis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

import msgspec

from overlay.environment import Clock
from overlay.peers import Contact
from overlay.transport import Body, Buffer, ReceivedResponse, RequestRejected, Response, TransportError
from training.encoding.frames import BadFrame
from training.exchange.messages import decode, encode
from training.exchange.timeouts import AdaptiveTimeouts, Kind
from training.exchange.trust import MemberTrust
from training.swarm import Swarm

A = TypeVar("A", bound=msgspec.Struct)
Handler = Callable[[Contact, bytes, AsyncIterator[Buffer]], Awaitable[Response]]
TypedHandler = Callable[[Contact, A, AsyncIterator[Buffer]], Awaitable[Response]]


class ExchangeRpc:
    """Sends and serves the requests of one node.

    A request goes to the node's present address. A claim of ownership names the one that the owner had then, and a node
    that was started again since may be at another.
    """

    def __init__(self, swarm: Swarm, genesis: bytes, clock: Clock, trust: MemberTrust | None = None) -> None:
        """`trust`: requests of members that are left out are refused."""
        self._trust = MemberTrust() if trust is None else trust
        self._swarm = swarm
        self._genesis = genesis
        self._clock = clock
        self._timeouts = AdaptiveTimeouts()
        #: The requests in flight of each node.
        self._in_flight: dict[bytes, dict[asyncio.Timeout, None]] = {}

    def register(self, name: str, kind: type[A], handle: TypedHandler[A]) -> None:
        """Serve requests of this name, which carry messages of this type."""
        self._swarm.register(name, checked(kind, self._genesis, handle, self._trust))

    async def ask(
        self, to: Contact, name: str, message: msgspec.Struct, kind: type[A], timeout_s: float, body: Body = ()
    ) -> A:
        """A request whose answer has no body, given up after a silence of `timeout_s`, or of more where this peer was
        slow before: on a full line a small question waits for seconds behind everything else.

        Raises `TransportError`; a malformed answer counts as `foreign`.
        """
        to = self._swarm.contact(to.node_id) or to
        limit_s = max(timeout_s, self._timeout_s("question", to))
        with self._measured("question", to) as responded:
            async with (
                self._while_it_lives(to),
                self._swarm.request(to, name, encode(message), body, timeout_s=limit_s) as answer,
            ):
                responded(answer)
                return self.decoded(to, answer.head, kind)

    @asynccontextmanager
    async def request(
        self, kind: Kind, to: Contact, message: msgspec.Struct, body: Body = ()
    ) -> AsyncIterator[ReceivedResponse]:
        """A request with bodies, given up after a silence that depends on the response times measured so far.

        The caller retries under the same identity. Raises `TransportError`.
        """
        to = self._swarm.contact(to.node_id) or to
        timeout_s = self._timeout_s(kind, to)
        with self._measured(kind, to) as responded:
            async with (
                self._while_it_lives(to),
                self._swarm.request(to, kind, encode(message), body, timeout_s=timeout_s) as answer,
            ):
                responded(answer)
                yield answer

    def found_dead(self, node_id: bytes) -> None:
        """End the requests in flight to a node: each raises `TransportError` where it waits."""
        for limit in self._in_flight.get(node_id, {}):
            limit.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def _while_it_lives(self, to: Contact) -> AsyncIterator[None]:
        """Raises `TransportError` (`reset`) as soon as the node is found dead."""
        requests = self._in_flight.setdefault(to.node_id, {})
        limit = asyncio.timeout(None)
        requests[limit] = None
        try:
            async with limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TransportError("reset", to.address, "was found dead while it was asked") from error
        finally:
            del requests[limit]
            if not requests:
                self._in_flight.pop(to.node_id, None)

    def _timeout_s(self, kind: Kind, to: Contact) -> float:
        return self._timeouts.timeout_s(kind, to.node_id, is_suspect=self._swarm.is_suspect(to.node_id))

    @contextmanager
    def _measured(self, kind: Kind, to: Contact) -> Iterator[Callable[[ReceivedResponse], None]]:
        """Count how long a request of the body waits for its response, and its timeout."""
        began = self._clock.monotonic()

        def responded(answer: ReceivedResponse) -> None:
            # The time that the peer took, without the transfer of the body: that depends on the line and the body.
            took_s = self._clock.monotonic() - began if answer.waited_s is None else answer.waited_s
            self._timeouts.on_response(kind, to.node_id, took_s)

        try:
            yield responded
        except TransportError as error:
            if error.kind == "timeout":
                self._timeouts.on_timeout(kind, to.node_id)
            raise

    def decoded(self, source: Contact, head: bytes, kind: type[A]) -> A:
        """The head of an answer as its message. Raises `TransportError` (`foreign`) when it is malformed."""
        try:
            return decode(head, kind)
        except msgspec.DecodeError as error:
            raise TransportError("foreign", source.address, f"gave a malformed answer: {error}") from error


def checked(kind: type[A], genesis: bytes, handle: TypedHandler[A], trust: MemberTrust) -> Handler:
    """A request handler that decodes its message and rejects those of another swarm, and of a member left out."""

    async def handler(sender: Contact, payload: bytes, stream: AsyncIterator[Buffer]) -> Response:
        if sender.node_id not in trust:
            raise RequestRejected("this node leaves you out: what you sent was repeatedly not true")
        try:
            message = decode(payload, kind)
        except msgspec.DecodeError as error:
            raise RequestRejected(f"malformed {kind.__name__}: {error}") from error
        if message.genesis != genesis:  # type: ignore[attr-defined]
            raise RequestRejected("another swarm: the genesis differs")
        try:
            return await handle(sender, message, stream)
        except BadFrame as error:
            raise RequestRejected(f"bad body: {error}") from error

    return handler
