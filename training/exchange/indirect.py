"""Requests to members that do not answer directly, by way of another member: request `indirect`.

A firewall, a clock that is off or another network can separate two members that others reach. SWIM asks a helper to
ping the silent one before it suspects it (Das et al. 2002); the exchange asks a helper to pass its requests on.

`MemberRoutes` records the members whose requests failed, decides when to look for a way to them, and remembers the
relay that was found; `training.exchange.recovery.route_finder` looks. A look asks the member directly too. While a
relay is in use there is a look every `CONFIRM_S`: direct requests are resumed soon, and a dead owner is not held for
alive because it was reached once.

`IndirectRequests` sends a request to a relay. That one names the sender, passes the body on as it comes, and the answer
back. The receiver handles it as a direct request of the sender. Only what a member itself has sent is passed on: a
request takes one relay at most, and cannot go in a circle. The relay keeps nothing but the buffers under way. Deltas
have identities, so one that arrives by both ways is added once. A relay is believed about who sent a request: members
are trusted not to lie. A direct request is proven by the transport.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import msgspec

from overlay.addresses import Address
from overlay.peers import Contact
from overlay.transport import Body, Buffer, ReceivedResponse, RequestRejected, Response, TransportError
from training.exchange.messages import Indirect, IndirectAnswer, decode, encode
from training.swarm import Swarm

#: A member that was killed is suspected by then (`overlay.membership.failure_detector`), and nobody looks for it.
FIRST_LOOK_S = 1.0
#: A suspect, or one that was declared dead, may be alive behind the hole. Otherwise others have its shards by then.
DOUBTED_LOOK_S = 10.0
CONFIRM_S = 5.0
#: Without an answer for so long a member is no candidate.
UNREACHED_S = 5.0
#: Between two looks that found no relay; each is twice as far away as the one before.
SEARCH_S, LONGEST_SEARCH_S = 2.0, 60.0
#: Members remembered; the one that failed first is forgotten first.
MAX_MEMBERS = 1024


@dataclass(slots=True)
class Route:
    """The way to one member that does not answer directly; times in monotonic seconds. `reason` is that of the last
    direct failure. `relay`: the member that passes requests on; empty while none is known."""

    address: Address
    reason: str
    since_s: float
    look_s: float
    relay: bytes = b""
    search_pause_s: float = SEARCH_S
    #: When a look ended last.
    looked_s: float = float("-inf")


class MemberRoutes:
    """The members that one node does not reach directly."""

    def __init__(self) -> None:
        self._routes: dict[bytes, Route] = {}

    def __bool__(self) -> bool:
        return bool(self._routes)

    def rows(self) -> dict[bytes, Route]:
        """The members that do not answer directly, for `/status`."""
        return dict(self._routes)

    def relay(self, node: bytes) -> bytes:
        """The member by way of which this one answers; empty: it is asked directly."""
        route = self._routes.get(node) if self._routes else None
        return b"" if route is None else route.relay

    def is_unreached(self, node: bytes, now_s: float) -> bool:
        """Whether direct requests to a member have failed for so long, without an answer between, that it is no queue
        on a slow line: an owner whose candidates come and go sends whole shards to each."""
        route = self._routes.get(node) if self._routes else None
        return route is not None and (bool(route.relay) or now_s - route.since_s >= UNREACHED_S)

    def failed(self, node: bytes, address: Address, reason: str, now_s: float, relay: bytes = b"") -> None:
        """A request to a member had no answer: a direct one, or one by way of `relay`."""
        route = self._routes.get(node)
        if relay:
            if route is not None and route.relay == relay:
                route.relay, route.look_s = b"", now_s
        elif route is None:
            self._routes[node] = Route(address, reason, now_s, now_s + FIRST_LOOK_S)
            if len(self._routes) > MAX_MEMBERS:
                del self._routes[next(iter(self._routes))]
        else:
            route.address, route.reason = address, reason

    def reached(self, node: bytes) -> bool:
        """A member has answered a direct request. True if it was asked by way of another until now."""
        route = self._routes.pop(node, None)
        return route is not None and bool(route.relay)

    def died(self, node: bytes) -> None:
        """The failure detector has declared a member dead: what it relays, and itself, is to be looked for anew."""
        for other, route in self._routes.items():
            if node in (other, route.relay):
                route.relay, route.look_s = b"", 0.0

    def is_due(self, node: bytes, now_s: float, *, is_doubted: bool) -> bool:
        """Whether to look for a way to a member now. `is_doubted`: the failure detector suspects it, or holds it for
        dead."""
        route = self._routes.get(node)
        if route is None or now_s < route.look_s:
            return False
        return bool(route.relay) or not is_doubted or now_s - route.since_s >= DOUBTED_LOOK_S

    def was_looked_for(self, node: bytes, now_s: float) -> bool:
        """Whether a look has ended in the last `DOUBTED_LOOK_S`: take-overs are not held up by another one."""
        route = self._routes.get(node)
        return route is not None and now_s - route.looked_s < DOUBTED_LOOK_S

    def found(self, node: bytes, relay: bytes, now_s: float) -> bool:
        """A look has ended: this member relays, or none does where that is empty. True if it is another than before."""
        route = self._routes.get(node)
        if route is None:
            return False
        route.looked_s = now_s
        if relay:
            route.look_s, route.search_pause_s = now_s + CONFIRM_S, SEARCH_S
        else:
            route.look_s = now_s + route.search_pause_s
            route.search_pause_s = min(2 * route.search_pause_s, LONGEST_SEARCH_S)
        is_new, route.relay = bool(relay) and relay != route.relay, relay
        return is_new


NAME = "indirect"
#: An answer by way of a relay takes this much longer: the relay's own wait ends first, and its reason arrives.
RELAY_S = 1.0
#: A relay waits no longer than this for silence to end, whatever the sender asks.
LONGEST_WAIT_S = 30.0
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
        timeout_s = min(message.timeout_ms / 1000.0, LONGEST_WAIT_S)
        sent = self._swarm.request(to, NAME, encode(message), stream, timeout_s=timeout_s)
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
