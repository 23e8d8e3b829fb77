"""Requests to members that do not answer directly, by way of another member: request `indirect`.

A firewall, a clock that is off or another network can separate two members that others reach. SWIM asks a helper to
ping the silent one before it suspects it (Das et al. 2002); the exchange asks a helper to pass its requests on.

The relay names the sender, passes the body on as it comes, and the answer back. The receiver handles the request as a
direct one of the sender. Only what a member itself has sent is passed on: a request takes one relay at most, and cannot
go in a circle. The relay keeps nothing but the buffers under way. Deltas have identities, so one that arrives by both
ways is added once. A relay is believed about who sent a request: members are trusted not to lie.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import msgspec

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import Body, Buffer, ReceivedResponse, RequestRejected, Response, TransportError
from p2pnode.training.exchange.messages import Indirect, IndirectAnswer, decode, encode
from p2pnode.training.swarm import Swarm

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
