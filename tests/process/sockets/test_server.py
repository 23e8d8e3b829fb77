"""Handlers that fail or are left, and invalid input at the port."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from p2pnode.overlay.sockets import server as server_module
from p2pnode.overlay.sockets import transport as transport_module
from p2pnode.overlay.sockets.concurrency import places_of
from p2pnode.overlay.sockets.framing import HEADER, MAGIC, Kind, beginning
from p2pnode.overlay.transport import Request, Response
from tests.harness.runner.stories import played_by, run_by
from tests.process.harness.sockets import LATE_S, MB, Node, Run, ask, failure, paced, run

__all__ = ["paced", "run"]


@run_by("run")
async def test_handler_that_fails() -> None:
    """A handler's exception is logged once with the request's name, and is a `reset` for the caller."""
    async with Node() as one, Node() as two:
        error = await failure(ask(one, two.address, "fail"))
        assert error.kind == "reset"
        assert [(event, fields["request"]) for event, fields in two.log.events] == [("request_handler_failed", "fail")]


@run_by("run")
async def test_a_response_body_that_fails() -> None:
    """A response whose body raises is a `reset` for the caller, never a short body."""
    async with Node() as one, Node() as two:
        got = bytearray()

        async def read() -> None:
            async with one.transport.request(two.address, "half", b"", timeout_s=LATE_S) as answer:
                async for chunk in answer.body:
                    got.extend(chunk)

        assert (await failure(read())).kind == "reset"
        assert len(got) in (0, 1000)
        assert [event for event, _ in two.log.events] == ["request_handler_failed"]


@run_by("run")
async def test_leaving_early_cancels_the_handler() -> None:
    """If the caller leaves its block early, the body's generator is closed and a running handler is cancelled."""
    async with Node() as one, Node() as two:
        async with asyncio.timeout(60):
            async with one.transport.request(two.address, "give", str(500 * MB).encode(), timeout_s=LATE_S):
                pass
            task = asyncio.ensure_future(ask(one, two.address, "hang"))
            await two.hanging.wait()
            task.cancel()
            await two.cancelled.wait()
            with contextlib.suppress(asyncio.CancelledError):
                await task


JUNK = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    MAGIC,
    HEADER.pack(MAGIC, 77, False, 0, 0, 0),
    beginning(Kind.OK, b"an answer", 0),
    HEADER.pack(MAGIC, Kind.REQUEST, False, 4, 0xFFFFFFFF, 0) + b"echo",
    beginning(Kind.REQUEST, b"cut", 100, name=b"echo"),
    beginning(Kind.REQUEST, b"cut", None, name=b"echo") + b"\xff" * 8,
    b"A" * 100_000,
    b"\r\n" * 1000,
    bytes(range(256)) * 100,
]


@pytest.mark.parametrize("junk", JUNK, ids=range(len(JUNK)))
def test_invalid_input_at_the_port(run: Run, junk: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    """Invalid bytes end only their own connection and print nothing; the next request succeeds."""

    async def main() -> None:
        async with Node() as one, Node() as two:
            reader, writer = await asyncio.open_connection(*two.address)
            writer.write(junk)
            with contextlib.suppress(ConnectionError):
                writer.write_eof()
                async with asyncio.timeout(60):
                    await reader.read()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            assert await ask(one, two.address, "echo", b"well") == (b"well", b"")

    run(main())
    assert capfd.readouterr().err == ""


def dropped(node: Node) -> int:
    """Connections closed for others, or before they were open."""
    return sum(node.transport.counters.get(f"streams_dropped_{why}", 0) for why in ("crowded", "busy"))


@played_by("paced")
async def test_a_request_that_takes_longer_than_a_connection_may_rest_is_answered(
    rest_s: float, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one and a later one: the times for the next request do not run while one is served."""
    monkeypatch.setattr(server_module, "FIRST_REQUEST_S", rest_s)
    monkeypatch.setattr(server_module, "KEEP_ALIVE_S", rest_s)
    async with Node() as one, Node() as two:

        async def slow(incoming: Request) -> Response:
            await asyncio.sleep(2 * rest_s)
            return Response(incoming.head)

        assert two.transport._server is not None
        two.transport._server._on_request = slow
        for _ in range(2):
            assert await ask(one, two.address, "slow", b"done") == (b"done", b"")


@run_by("run")
async def test_idle_connections_keep_no_member_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of few descriptors is connected to more often than it has places. A member is served all the same, its
    idle connection outlasts the silent ones, and these are closed after a while."""
    monkeypatch.setattr(transport_module, "MAX_DESCRIPTORS", 100)
    monkeypatch.setattr(server_module, "FIRST_REQUEST_S", 1.0)
    async with Node() as one, Node() as two:
        assert await ask(one, two.address, "echo", b"before") == (b"before", b"")
        idle = await asyncio.gather(*(asyncio.open_connection(*two.address) for _ in range(60)))
        async with asyncio.timeout(60):
            while dropped(two) < 60 - places_of(100):  # noqa: ASYNC110  no event says so
                await asyncio.sleep(0.01)
        assert await ask(one, two.address, "echo", b"among them") == (b"among them", b"")
        assert len(set(two.streams)) == 1  # the same connection, which was not crowded out
        assert two.transport._server is not None
        assert len(two.transport._server._connections) <= places_of(100)
        async with asyncio.timeout(60):
            for reader, _ in idle:
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
        assert await ask(one, two.address, "echo", b"after") == (b"after", b"")
        for _, writer in idle:
            writer.close()
