"""Nodes on real sockets of the loopback, under asyncio and uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.sockets.transport import SocketTransport
from p2pnode.overlay.system import SystemClock
from p2pnode.overlay.transport import (
    Buffer,
    Request,
    RequestRejected,
    RequestStream,
    Response,
    TransportError,
)

LOCAL = "127.0.0.1"

MB = 1 << 20

#: How long an answer may take that has to come: a loaded machine is late.
LATE_S = 60.0


class Recorder:
    """A log that keeps its events."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def debug(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    info = warning = error = debug


class Node:
    """A transport with handlers: `echo`, `count`, `refuse`, `fail`, `hang`, `give`, `half`."""

    def __init__(self, host: str = LOCAL, port: int = 0) -> None:
        self.log = Recorder()
        self.transport = SocketTransport(host, port, log=self.log, clock=SystemClock())
        self.datagrams: asyncio.Queue[tuple[bytes, Address]] = asyncio.Queue()
        self.sources: list[Address] = []
        self.streams: list[RequestStream] = []
        self.hanging = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __aenter__(self) -> Node:
        await self.transport.open(lambda data, source: self.datagrams.put_nowait((data, source)), self.handle)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.transport.close()

    @property
    def address(self) -> Address:
        return self.transport.address

    async def handle(self, incoming: Request) -> Response:
        self.sources.append(incoming.source)
        assert incoming.stream is not None
        self.streams.append(incoming.stream)
        if incoming.name == "echo":
            return Response(incoming.head, incoming.body)
        if incoming.name == "count":
            try:
                total = sum([len(chunk) async for chunk in incoming.body])
            except (TransportError, asyncio.CancelledError):
                self.cancelled.set()
                raise
            return Response(str(total).encode())
        if incoming.name == "refuse":
            raise RequestRejected("the step is too old — €")
        if incoming.name == "fail":
            raise KeyError("a mistake of ours")
        if incoming.name == "hang":
            self.hanging.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        if incoming.name == "give":
            return Response(b"", pattern(int(incoming.head)))
        if incoming.name == "half":
            return Response(b"half", broken())
        if incoming.name == "trickle":
            return Response(b"", trickle(float(incoming.head)))
        raise RequestRejected(f"unknown request {incoming.name!r}")


def pattern(total: int, slice_bytes: int = MB) -> Iterator[Buffer]:
    """`total` bytes that differ everywhere, in views of one buffer that is overwritten for each chunk."""
    buffer = bytearray(slice_bytes)
    for start in range(0, total, slice_bytes):
        buffer[:] = block(start // slice_bytes, slice_bytes)
        yield memoryview(buffer)[: min(slice_bytes, total - start)]


def block(number: int, size: int) -> bytes:
    return ((number * 2654435761) % (1 << 32)).to_bytes(4, "big") * (size // 4) + b"x" * (size % 4)


async def broken() -> AsyncIterator[bytes]:
    yield b"x" * 1000
    raise KeyError("a mistake in the middle")


async def trickle(pause_s: float) -> AsyncIterator[bytes]:
    """Twenty bytes, one at a time."""
    for _ in range(20):
        yield b"x"
        await asyncio.sleep(pause_s)


async def ask(
    node: Node, to: Address, name: str, head: bytes = b"", body: Any = (), timeout_s: float = LATE_S
) -> tuple[bytes, bytes]:
    async with node.transport.request(to, name, head, body, timeout_s=timeout_s) as answer:
        return answer.head, b"".join([bytes(chunk) async for chunk in answer.body])


async def failure(request: Awaitable[Any]) -> TransportError:
    with pytest.raises(TransportError) as caught:
        await request
    return caught.value


Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a test's coroutine on one of the two loops; fails if a task is left over or an error was not handled."""

    def on_loop(coroutine: Coroutine[Any, Any, None]) -> None:
        unhandled: list[dict[str, Any]] = []

        async def main() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unhandled.append(context))
            async with asyncio.timeout(3 * LATE_S):
                await coroutine
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            assert left == []

        factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main())
        assert unhandled == [], unhandled

    return on_loop


#: A timer of the loop that is late by so much of a timeout: the machine is too busy for this timeout.
LATE = 0.2
#: The timeouts of `Paced`, one after the other.
TIMEOUTS_S = (0.4, 1.6, 6.4)

Paced = Callable[[Callable[[float], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def paced(run: Run) -> Paced:
    """Runs a scenario that takes its timeout as an argument, and sets all its times by that. Where it fails with one it
    must succeed with the next: the kernel alone may stand for the shortest, as it looks at a closed window 0.2 s and
    then 0.4 s later. A failure while the loop's own timers were late counts as none."""

    def at_a_pace(scenario: Callable[[float], Coroutine[Any, Any, None]]) -> None:
        failed = 0
        for timeout_s in TIMEOUTS_S:
            late_s = [0.0]
            try:
                run(_watched(scenario(timeout_s), late_s))
            except (Exception, pytest.fail.Exception) as error:
                failed += late_s[0] < LATE * timeout_s
                if failed > 1 or timeout_s == TIMEOUTS_S[-1]:
                    raise
                print(f"timers were up to {late_s[0]:.2f} s late beside a timeout of {timeout_s} s: {error!r}")
            else:
                return

    return at_a_pace


async def _watched(scenario: Coroutine[Any, Any, None], late_s: list[float]) -> None:
    """Run it, and measure how late a timer comes at most."""
    interval_s = 0.02

    async def watch() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(interval_s)
            late_s[0] = max(late_s[0], time.monotonic() - before - interval_s)

    watching = asyncio.ensure_future(watch())
    try:
        await scenario
    finally:
        watching.cancel()
        await asyncio.wait([watching])


Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def other_server(talk: Talk) -> AsyncIterator[Address]:
    """A TCP server that is not a p2pnode."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await talk(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await writer.wait_closed()
        done.set()

    done = asyncio.Event()
    server = await asyncio.start_server(serve, LOCAL, 0)
    try:
        yield Address(LOCAL, server.sockets[0].getsockname()[1])
    finally:
        server.close()
        async with asyncio.timeout(60):
            await done.wait()


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True
