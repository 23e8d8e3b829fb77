"""Requests by way of a relay, over nodes that call each other's handlers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import NOT_SERVED, Buffer, ReceivedResponse, RequestRejected, Response, TransportError
from p2pnode.training.exchange.messages import Indirect, encode
from p2pnode.training.exchange.rpc import NAME, RELAY_S, IndirectRequests
from tests.harness.builders.stores import contact

A, B, C = contact("a"), contact("b"), contact("c")


class Node:
    """One node: it implements the part of `training.swarm.Swarm` that is needed, and answers with what it is sent."""

    def __init__(self, me: Contact, others: dict[bytes, Node]) -> None:
        self.node_id, self.address = me.node_id, me.address
        self.others = others
        others[me.node_id] = self
        #: How requests of this node to others fail.
        self.holes: dict[bytes, TransportError] = {}
        self.served: list[tuple[str, Contact, bytes]] = []
        self.timeouts_s: list[float] = []
        self.left = 0
        self.breaks = False
        self.indirect = IndirectRequests(self, self.dispatch)  # type: ignore[arg-type]

    def contact(self, node_id: bytes) -> Contact | None:
        return None

    async def dispatch(self, name: str, origin: Contact, payload: bytes, stream: AsyncIterator[Buffer]) -> Response:
        if name == "refused":
            raise RequestRejected(f"{NOT_SERVED} 'refused'")
        self.served.append((name, origin, payload))
        return Response(payload + b"!", self._echo(stream))

    async def _echo(self, stream: AsyncIterator[Buffer]) -> AsyncIterator[Buffer]:
        async for buffer in stream:
            yield bytes(buffer).upper()
            if self.breaks:
                raise TransportError("reset", self.address, "broke")

    @asynccontextmanager
    async def request(
        self, to: Contact, name: str, payload: bytes, body: Any = (), *, timeout_s: float
    ) -> AsyncIterator[ReceivedResponse]:
        assert name == NAME
        self.timeouts_s.append(timeout_s)
        if (error := self.holes.get(to.node_id)) is not None:
            raise error
        try:
            reply = await self.others[to.node_id].indirect.handle(
                Contact(self.node_id, self.address), payload, _stream(body)
            )
        except RequestRejected as error:
            raise TransportError("rejected", to.address, str(error)) from error
        try:
            yield ReceivedResponse(reply.head, _stream(reply.body))
        finally:
            self.left += 1
            if (aclose := getattr(reply.body, "aclose", None)) is not None:
                await aclose()


async def _stream(body: Any) -> AsyncIterator[Buffer]:
    if hasattr(body, "__aiter__"):
        async for buffer in body:
            yield buffer
        return
    for buffer in body:
        yield buffer


def nodes() -> tuple[Node, Node, Node]:
    """Three nodes, of which a does not reach b."""
    found: dict[bytes, Node] = {}
    a, b, c = (Node(one, found) for one in (A, B, C))
    a.holes[B.node_id] = TransportError("refused", B.address, "refused the connection")
    return a, b, c


async def sent(node: Node, name: str = "push", body: Any = ()) -> tuple[bytes, bytes]:
    async with node.indirect.request(C, B, name, b"payload", body, 2.0) as answer:
        return answer.head, b"".join([bytes(buffer) async for buffer in answer.body])


def test_a_request_arrives_as_its_senders_own_and_the_answer_comes_back() -> None:
    """With both bodies; the receiver sees the sender, under the address that the relay knows."""
    a, b, c = nodes()

    assert asyncio.run(sent(a, body=[b"ab", b"cd"])) == (b"payload!", b"ABCD")
    assert b.served == [("push", A, b"payload")]
    assert (a.timeouts_s, c.timeouts_s) == ([2.0 + RELAY_S], [2.0])
    assert (a.left, c.left) == (1, 1)  # no stream stays open


@pytest.mark.parametrize("kind", ["refused", "timeout", "reset"])
def test_the_failure_of_a_relay_to_reach_the_receiver_is_one_of_the_receiver(kind: Any) -> None:
    """With the relay's reason, and the receiver's address."""
    a, _, c = nodes()
    c.holes[B.node_id] = TransportError(kind, B.address, "the reason")

    with pytest.raises(TransportError) as caught:
        asyncio.run(sent(a))
    assert (caught.value.kind, caught.value.address, caught.value.detail) == (kind, B.address, "the reason")


def test_a_relay_that_is_not_reached_is_named() -> None:
    """The error is still about the receiver: the caller asks again, in another way."""
    a, *_ = nodes()
    a.holes[C.node_id] = TransportError("timeout", C.address, "did not answer")

    with pytest.raises(TransportError) as caught:
        asyncio.run(sent(a))
    assert caught.value.address == B.address
    assert caught.value.detail == f"was asked by way of {C.address}, which did not answer"


def test_a_rejection_of_the_receiver_comes_back_as_it_is() -> None:
    """Some texts have a meaning (`TransportError.is_not_served`)."""
    a, *_ = nodes()

    with pytest.raises(TransportError) as caught:
        asyncio.run(sent(a, "refused"))
    assert caught.value.is_not_served


def test_an_answer_that_breaks_off_breaks_off_at_the_sender() -> None:
    """It never looks complete."""
    a, b, _ = nodes()
    b.breaks = True

    with pytest.raises(TransportError):
        asyncio.run(sent(a, body=[b"ab", b"cd"]))


def test_a_request_takes_one_relay_at_most() -> None:
    """What was passed on already is refused by a node that it is not for: it cannot go in a circle."""
    a, _, c = nodes()
    passed_on = Indirect(B.node_id, *B.address, "push", 1000, b"", A.node_id, *A.address)

    with pytest.raises(RequestRejected, match="passed on already"):
        asyncio.run(c.indirect.handle(A, encode(passed_on), _stream(())))
    assert a.served == []


@pytest.mark.parametrize(
    "payload", [b"", b"\x93nonsense", encode(Indirect(C.node_id, *C.address, "x", 1, b"", b"", "?"))]
)
def test_what_is_malformed_is_rejected(payload: bytes) -> None:
    """A request of no known sender too."""
    *_, c = nodes()

    with pytest.raises(RequestRejected, match="malformed Indirect"):
        asyncio.run(c.indirect.handle(A, payload, _stream(())))


def test_whether_a_member_answers_directly_or_by_way_of_another() -> None:
    """The question is longer than a packet and reaches no handler. A rejection is an answer."""
    a, b, c = nodes()

    async def answers(node: Node, relay: Contact | None) -> bool:
        return await node.indirect.failure(B, relay, 1.0) is None

    async def all_answers() -> list[bool]:
        found = [await answers(a, None), await answers(a, C), await answers(c, None)]
        c.holes[B.node_id] = TransportError("timeout", B.address, "did not answer")
        found += [await answers(a, C)]
        c.holes[B.node_id] = TransportError("rejected", B.address, "this node leaves you out")
        return [*found, await answers(c, None), await answers(a, C)]

    assert asyncio.run(all_answers()) == [False, True, True, False, True, False]
    assert b.served == []
