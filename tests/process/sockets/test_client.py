"""Requests that fail: every failure has its kind, and the client leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.sockets.framing import HEADER, MAGIC, Kind, beginning
from p2pnode.overlay.transport import (
    MAX_HEAD_BYTES,
    TransportError,
)
from tests.harness.runner.stories import played_by, run_by
from tests.process.harness.free_port import free_port
from tests.process.harness.sockets import (
    LATE_S,
    LOCAL,
    MB,
    Node,
    Talk,
    ask,
    failure,
    other_server,
    paced,
    pattern,
    run,
    trickle,
)

__all__ = ["paced", "run"]


@run_by("run")
async def test_refused() -> None:
    """A port without a listener is `refused`."""
    async with Node() as one:
        with socket.socket() as silent:  # nobody else can listen there meanwhile
            silent.bind((LOCAL, 0))
            error = await failure(ask(one, Address(LOCAL, silent.getsockname()[1]), "echo"))
        assert error.kind == "refused"


@run_by("run")
async def test_a_rejection_has_its_reason() -> None:
    """A request that the handler rejects, such as an unknown name, is `rejected` with the reason."""
    async with Node() as one, Node() as two:
        error = await failure(ask(one, two.address, "no/such thing?"))
        assert (error.kind, error.detail) == ("rejected", "unknown request 'no/such thing?'")


@run_by("run")
async def test_the_past_of_a_connection_is_no_movement_of_a_request() -> None:
    """A request on a pooled connection counts what moves while it uses it: its peer may have died since the last."""
    async with Node() as one, Node() as two:
        assert (await ask(one, two.address, "count", b"", pattern(2 * MB)))[0] == str(2 * MB).encode()
        outgoing = one.transport.request(two.address, "hang", b"", (), timeout_s=LATE_S)
        asking = asyncio.create_task(outgoing.__aenter__())
        await asyncio.wait_for(two.hanging.wait(), LATE_S)
        assert len(two.sources) == 2
        assert two.sources[0] == two.sources[1]
        assert outgoing.moved_bytes() < 1000
        asking.cancel()
        await asyncio.wait([asking])


@pytest.mark.parametrize("kind", ["list", "generator"])
@run_by("run")
async def test_rejection_with_an_unread_body(kind: str) -> None:
    """A rejection arrives although 5 MB were not read, and the next request succeeds."""
    async with Node() as one, Node() as two:
        body: Any = [bytes(MB)] * 5 if kind == "list" else pattern(5 * MB)
        error = await failure(ask(one, two.address, "refuse", b"", body))
        assert (error.kind, error.detail) == ("rejected", "the step is too old — €")
        assert await ask(one, two.address, "echo", b"next") == (b"next", b"")


@pytest.mark.parametrize("amount", [1, 5 * MB])
@run_by("run")
async def test_own_body_that_fails(amount: int) -> None:
    """An exception of the caller's own body reaches the caller unchanged, and the handler never gets the end."""

    async def body() -> AsyncIterator[bytes]:
        yield bytes(amount)
        raise LookupError("mine")

    async with Node() as one, Node() as two:
        with pytest.raises(LookupError, match="mine"):
            await ask(one, two.address, "count", b"", body())
        async with asyncio.timeout(60):
            await two.cancelled.wait()
        assert two.log.events == []


@played_by("paced")
async def test_a_handler_that_does_not_answer_is_a_timeout(timeout_s: float) -> None:
    """After the caller's timeout the request fails with `timeout`, and the handler is cancelled."""
    async with Node() as one, Node() as two:
        started = time.monotonic()
        error = await failure(ask(one, two.address, "hang", timeout_s=timeout_s))
        assert error.kind == "timeout"
        assert 0.8 * timeout_s < time.monotonic() - started < 3 * timeout_s
        async with asyncio.timeout(LATE_S):
            await two.cancelled.wait()


@played_by("paced")
async def test_a_peer_that_stops_reading_is_a_timeout(timeout_s: float) -> None:
    """A peer that stops reading the body is a `timeout`, and the body's generator is closed."""
    closed = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        try:
            while True:
                yield bytes(MB)
        finally:
            closed.set()

    async with Node() as one, Node() as two:
        error = await failure(ask(one, two.address, "hang", b"", body(), timeout_s=timeout_s))
        assert error.kind == "timeout"
        assert closed.is_set()


@played_by("paced")
async def test_slow_progress_does_not_time_out(timeout_s: float) -> None:
    """A slow response and a slow request succeed while every single wait is shorter than the timeout."""
    pause_s = timeout_s / 10
    async with Node() as one, Node() as two:
        _, body = await ask(one, two.address, "trickle", str(pause_s).encode(), timeout_s=timeout_s)
        assert body == b"x" * 20
        head, _ = await ask(one, two.address, "count", b"", trickle(pause_s), timeout_s=timeout_s)
        assert head == b"20"


@run_by("run")
async def test_a_cancellation_while_an_upload_ends_is_not_swallowed() -> None:
    """If the calling task is cancelled while its body is being closed, it ends as cancelled."""
    closing, may_close = asyncio.Event(), asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        try:
            while True:
                yield bytes(MB)
        finally:
            closing.set()
            await may_close.wait()

    async def request(one: Node, two: Node) -> None:
        with contextlib.suppress(TransportError):
            await ask(one, two.address, "refuse", b"", body())
        raise AssertionError("it continued after it was cancelled")

    async with Node() as one, Node() as two:
        task = asyncio.ensure_future(request(one, two))
        async with asyncio.timeout(60):
            await closing.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_close.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


@pytest.mark.parametrize("size", [10, 3 * MB])
@run_by("run")
async def test_restarted_peer_on_the_same_port(size: int) -> None:
    """A request on an idle connection that a restarted peer has closed is repeated, if its body is a list."""
    async with Node() as one:
        two = Node(LOCAL, free_port())  # which no connection takes as its near end in between
        async with two:
            assert await ask(one, two.address, "echo", b"1") == (b"1", b"")
        async with Node(LOCAL, two.address.port) as again:
            head, _ = await ask(one, again.address, "count", b"", [bytes(size)])
            assert head == str(size).encode()


async def _plain_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
    await writer.drain()


async def _redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 307 Go\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n")
    await writer.drain()


async def _garbage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"220 mail.example ESMTP\r\n\x00\xff\x15\x03\x01")
    await writer.drain()


async def _bad_length(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(HEADER.pack(MAGIC, Kind.OK, False, 0, MAX_HEAD_BYTES + 1, 0))
    await writer.drain()


async def _short_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(beginning(Kind.OK, b"h", 100) + b"body")
    await writer.drain()


async def _close(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")


async def _no_answer(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    await reader.read()


@pytest.mark.parametrize(
    ("talk", "kind"),
    [
        (_plain_http, "foreign"),
        (_redirect, "foreign"),
        (_garbage, "foreign"),
        (_bad_length, "foreign"),
        (_short_body, "reset"),
        (_close, "reset"),
        (_no_answer, "timeout"),
    ],
)
@run_by("run")
async def test_other_servers(talk: Talk, kind: str) -> None:
    """A server that is no node, an incomplete response and no response have their own kinds."""
    timeout_s = 0.5 if kind == "timeout" else LATE_S
    async with Node() as one, other_server(talk) as address:
        assert (await failure(ask(one, address, "echo", timeout_s=timeout_s))).kind == kind


@run_by("run")
async def test_a_stream_that_is_not_kept_ends_with_its_response() -> None:
    """At both ends, so that a node through which many join is connected to none of them; one that was kept before stays
    for others."""
    async with Node() as one, Node() as two:

        async def hello() -> None:
            async with one.transport.request(two.address, "echo", b"x", timeout_s=LATE_S, keep=False) as answer:
                assert answer.head == b"x"
                assert [bytes(chunk) async for chunk in answer.body] == []

        await hello()
        assert one.transport._client.pool._idle == {}
        served = two.transport._server
        assert served is not None
        serving = [each.task for each in served._connections.values()]
        assert not serving or not (await asyncio.wait(serving, timeout=LATE_S))[1]
        await ask(one, two.address, "echo", b"x")
        kept = [list(idle) for idle in one.transport._client.pool._idle.values()]
        assert len(kept[0]) == 1
        await hello()
        assert list(one.transport._client.pool._idle.values()) == kept
