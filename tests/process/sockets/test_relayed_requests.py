"""Indirect requests over real sockets: large bodies both ways, and streams that break behind the relay."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import Buffer, ReceivedResponse, Request, RequestRejected, Response, TransportError
from p2pnode.training.exchange.rpc import IndirectRequests
from tests.harness.runner.stories import run_by
from tests.process.harness.sockets import LATE_S, MB, Node, Run, block, failure, pattern, run

__all__ = ["run"]


class Member(Node):
    """A node with indirect requests; what it is sent, it sends back."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.node_id = name.encode() * 20
        self.indirect = IndirectRequests(self, self.dispatch)
        self.breaks_at: int | None = None

    @property
    def me(self) -> Contact:
        return Contact(self.node_id, self.address)

    def contact(self, node_id: bytes) -> Contact | None:
        return None

    def request(
        self, to: Contact, name: str, payload: bytes, body: Any = (), *, timeout_s: float
    ) -> AbstractAsyncContextManager[ReceivedResponse]:
        return self.transport.request(to.address, name, payload, body, timeout_s=timeout_s)

    async def handle(self, incoming: Request) -> Response:
        return await self.indirect.handle(SENDER[0].me, incoming.head, incoming.body)

    async def dispatch(self, name: str, origin: Contact, payload: bytes, stream: AsyncIterator[Buffer]) -> Response:
        if name == "refused":
            raise RequestRejected("the disk is full")
        assert origin == SENDER[0].me
        return Response(payload, self._echo(stream))

    async def _echo(self, stream: AsyncIterator[Buffer]) -> AsyncIterator[Buffer]:
        sent = 0
        async for buffer in stream:
            sent += len(buffer)
            if self.breaks_at is not None and sent > self.breaks_at:
                await self.transport.close()
            yield buffer


#: In place of the envelope, which would name it: who sends all requests of a test.
SENDER: list[Member] = []


async def asked(one: Member, relay: Member, other: Member, name: str, body: Any) -> tuple[bytes, bytes]:
    SENDER[:] = [one]
    received = bytearray()
    async with one.indirect.request(relay.me, other.me, name, b"payload", body, LATE_S) as answer:
        async for buffer in answer.body:
            received += buffer
        return answer.head, bytes(received)


@run_by("run")
async def test_large_bodies_pass_a_relay_both_ways() -> None:
    """24 MB, in buffers that the sender overwrites: they arrive as they were, at the same time in both directions."""
    async with Member("a") as one, Member("b") as other, Member("c") as relay:
        head, echoed = await asked(one, relay, other, "echo", pattern(24 * MB))
        assert head == b"payload"
        assert echoed == b"".join(block(number, MB) for number in range(24))
        error = await failure(asked(one, relay, other, "refused", ()))
        assert (error.kind, error.detail) == ("rejected", "the disk is full")


@run_by("run")
async def test_a_stream_that_breaks_behind_the_relay_breaks_before_it() -> None:
    """The sender sees no short body. The relay's handler has not failed, and it can be used again."""
    async with Member("a") as one, Member("b") as other, Member("c") as relay:
        other.breaks_at = 8 * MB
        error = await failure(asked(one, relay, other, "echo", pattern(24 * MB)))
        assert error.kind in ("reset", "timeout")
        assert [event for event, _ in relay.log.events] == []
        async with Member("d") as third:
            assert await asked(one, relay, third, "echo", [b"again"]) == (b"payload", b"again")
        gone = await failure(asked(one, relay, third, "echo", [b"again"]))
        assert (gone.kind, gone.address) == ("refused", third.address)


def test_a_sender_that_leaves_early_frees_the_receiver(run: Run) -> None:
    """Its body is closed in the relay and at the receiver."""

    async def main() -> None:
        async with Member("a") as one, Member("b") as other, Member("c") as relay:
            SENDER[:] = [one]
            async with one.indirect.request(relay.me, other.me, "echo", b"", pattern(64 * MB), LATE_S) as answer:
                assert len(await anext(answer.body)) > 0
            assert await asked(one, relay, other, "echo", [b"again"]) == (b"payload", b"again")

    run(main())
    assert TransportError is not None
