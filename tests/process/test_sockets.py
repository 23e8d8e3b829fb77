"""The real door on 127.0.0.1: what passes, what fails, and how each failure is called. Under asyncio and uvloop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from overlay.addresses import Address
from overlay.sockets.transport import SocketTransport
from overlay.system import SystemClock
from overlay.transport import (
    MAX_DATAGRAM_BYTES,
    MAX_HEAD_BYTES,
    Buffer,
    PortInUse,
    Request,
    RequestRejected,
    Response,
    TransportError,
)

LOCAL = "127.0.0.1"
MB = 1 << 20


class Recorder:
    """A log that a test can look at."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def debug(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    info = warning = error = debug


class Node:
    """A transport with handlers: `echo`, `count`, `refuse`, `fail`, `hang`, `give`, `half`."""

    def __init__(self, host: str = LOCAL, port: int = 0) -> None:
        self.log = Recorder()
        self.door = SocketTransport(host, port, log=self.log, clock=SystemClock())
        self.datagrams: asyncio.Queue[tuple[bytes, Address]] = asyncio.Queue()
        self.sources: list[Address] = []
        self.hanging = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __aenter__(self) -> Node:
        await self.door.open(lambda data, source: self.datagrams.put_nowait((data, source)), self.handle)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.door.close()

    @property
    def address(self) -> Address:
        return self.door.address

    async def handle(self, incoming: Request) -> Response:
        self.sources.append(incoming.source)
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
            return Response(b"", trickle())
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


async def trickle() -> AsyncIterator[bytes]:
    for _ in range(20):
        yield b"x"
        await asyncio.sleep(0.05)


async def ask(
    node: Node, to: Address, name: str, head: bytes = b"", body: Any = (), timeout_s: float = 5.0
) -> tuple[bytes, bytes]:
    async with node.door.request(to, name, head, body, timeout_s=timeout_s) as answer:
        return answer.head, b"".join([bytes(chunk) async for chunk in answer.body])


async def failure(request: Awaitable[Any]) -> TransportError:
    with pytest.raises(TransportError) as caught:
        await request
    return caught.value


Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a test's coroutine on one of the two loops; fails when a task is left over or an error went unhandled."""

    def on_loop(coroutine: Coroutine[Any, Any, None]) -> None:
        unhandled: list[dict[str, Any]] = []

        async def main() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unhandled.append(context))
            async with asyncio.timeout(60):
                await coroutine
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            assert left == []

        factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main())
        assert unhandled == []

    return on_loop


def test_round_trip(run: Run) -> None:
    """A head and a body reach the handler, and an answer with both comes back; the source is the caller's host."""

    async def main() -> None:
        async with Node() as one, Node() as two:
            assert await ask(one, two.address, "echo", b"head", [b"abc", b"", b"def"]) == (b"head", b"abcdef")
            assert await ask(one, two.address, "echo") == (b"", b"")
            assert two.sources[0].host == LOCAL

    run(main())


def test_datagrams(run: Run) -> None:
    """A datagram arrives with its sender's listening address; one that is too long is dropped and logged once."""

    async def main() -> None:
        async with Node() as one, Node() as two:
            one.door.send(two.address, b"x" * (MAX_DATAGRAM_BYTES + 1))
            one.door.send(two.address, b"x" * (MAX_DATAGRAM_BYTES + 1))
            one.door.send(two.address, b"hello")
            async with asyncio.timeout(5):
                assert await two.datagrams.get() == (b"hello", one.address)
            assert [event for event, _ in one.log.events] == ["datagram_too_long"]

    run(main())


@pytest.mark.parametrize(
    "address",
    [
        (LOCAL, 99999),
        (LOCAL, -1),
        (LOCAL, 0),
        (None, 5),
        ("::1", 9),
        ("nowhere.invalid", 9),
        ("", 9),
        ("255.255.255.255", 9),
        (LOCAL, "x"),
        ("10\0", 9),
    ],
    ids=repr,
)
def test_no_address_kills_the_datagram_socket(run: Run, address: Any) -> None:
    """A datagram to an impossible address is dropped, and the next one to a possible address arrives."""

    async def main() -> None:
        async with Node() as one, Node() as two:
            one.door.send(Address(*address), b"lost")
            one.door.send(two.address, b"hello")
            async with asyncio.timeout(5):
                assert (await two.datagrams.get())[0] == b"hello"

    run(main())


def test_handler_of_datagrams_may_fail(run: Run) -> None:
    """A datagram handler that raises is logged once, and the socket goes on."""

    async def main() -> None:
        async with Node() as one, Node() as two:
            got = asyncio.Event()

            def handler(data: bytes, _source: Address) -> None:
                if data == b"bad":
                    raise IndexError("hostile")
                got.set()

            third = SocketTransport(LOCAL, 0, log=two.log, clock=SystemClock())
            await third.open(handler, two.handle)
            for data in (b"bad", b"bad", b"good"):
                one.door.send(third.address, data)
            async with asyncio.timeout(5):
                await got.wait()
            await third.close()
            assert [event for event, _ in two.log.events] == ["datagram_handler_failed"]

    run(main())


def test_stream_of_20_mb_both_ways(run: Run) -> None:
    """20 MB go up and come back unchanged although the sender overwrites its buffer for every chunk."""

    async def main() -> None:
        total = 20 * MB + 12345
        expected = b"".join(map(bytes, pattern(total)))
        async with Node() as one, Node() as two:
            _, back = await ask(one, two.address, "echo", b"", pattern(total))
            assert back == expected
            _, given = await ask(one, two.address, "give", str(total).encode())
            assert given == expected

    run(main())


def test_small_views_may_be_reused(run: Run) -> None:
    """Small chunks in views of one reused buffer arrive as they were when they were handed over."""

    async def main() -> None:
        async with Node() as one, Node() as two:
            _, back = await ask(one, two.address, "echo", b"", pattern(200_000, 1000))
            assert back == b"".join(map(bytes, pattern(200_000, 1000)))

    run(main())


def test_list_of_views(run: Run) -> None:
    """A body given as a list, also of views of numbers, is sent with its length and arrives whole."""

    async def main() -> None:
        numbers = memoryview(bytearray(4 * 300_000)).cast("f")
        async with Node() as one, Node() as two:
            head, _ = await ask(one, two.address, "count", b"", [numbers, b"end"])
            assert head == str(4 * 300_000 + 3).encode()

    run(main())


def test_large_head(run: Run) -> None:
    """A head of a few megabytes passes; one above the limit is refused before it is sent."""

    async def main() -> None:
        async with Node() as one, Node() as two:
            head, _ = await ask(one, two.address, "echo", b"h" * 3 * MB, [b"body"])
            assert len(head) == 3 * MB
            with pytest.raises(ValueError, match="at most"):
                one.door.request(two.address, "echo", bytes(MAX_HEAD_BYTES + 1), timeout_s=1)

    run(main())


def test_many_at_once(run: Run) -> None:
    """300 concurrent requests are all answered, each with its own answer."""

    async def main() -> None:
        async with Node() as one, Node() as two:
            answers = await asyncio.gather(
                *(ask(one, two.address, "echo", str(n).encode(), timeout_s=30) for n in range(300))
            )
            assert [int(head) for head, _ in answers] == list(range(300))

    run(main())


def test_asking_oneself(run: Run) -> None:
    """A node can ask itself."""

    async def main() -> None:
        async with Node() as one:
            assert await ask(one, one.address, "echo", b"me") == (b"me", b"")

    run(main())


def test_refused(run: Run) -> None:
    """Nobody listening is `refused`."""

    async def main() -> None:
        async with Node() as one:
            error = await failure(ask(one, Address(LOCAL, free_port()), "echo"))
            assert error.kind == "refused"

    run(main())


def test_unknown_name_is_the_handlers_business(run: Run) -> None:
    """What the handler rejects is `rejected` with its reason."""

    async def main() -> None:
        async with Node() as one, Node() as two:
            error = await failure(ask(one, two.address, "no/such thing?"))
            assert (error.kind, error.detail) == ("rejected", "unknown request 'no/such thing?'")

    run(main())


@pytest.mark.parametrize("kind", ["list", "generator"])
def test_rejection_with_an_unread_body(run: Run, kind: str) -> None:
    """A rejection arrives although 5 MB were not read, and the next request succeeds."""

    async def main() -> None:
        async with Node() as one, Node() as two:
            body: Any = [bytes(MB)] * 5 if kind == "list" else pattern(5 * MB)
            error = await failure(ask(one, two.address, "refuse", b"", body))
            assert (error.kind, error.detail) == ("rejected", "the step is too old — €")
            assert await ask(one, two.address, "echo", b"next") == (b"next", b"")

    run(main())


def test_handler_that_fails(run: Run) -> None:
    """A handler's exception is logged once with the request's name, and is a `reset` for the caller."""

    async def main() -> None:
        async with Node() as one, Node() as two:
            error = await failure(ask(one, two.address, "fail"))
            assert error.kind == "reset"
            assert [(event, fields["request"]) for event, fields in two.log.events] == [
                ("request_handler_failed", "fail")
            ]

    run(main())


def test_answer_that_fails_half_way(run: Run) -> None:
    """An answer whose body breaks off is a `reset` after what came before, never a short body."""

    async def main() -> None:
        async with Node() as one, Node() as two:
            got = bytearray()

            async def read() -> None:
                async with one.door.request(two.address, "half", b"", timeout_s=5) as answer:
                    async for chunk in answer.body:
                        got.extend(chunk)

            assert (await failure(read())).kind == "reset"
            assert len(got) in (0, 1000)
            assert [event for event, _ in two.log.events] == ["request_handler_failed"]

    run(main())


@pytest.mark.parametrize("amount", [1, 5 * MB])
def test_own_body_that_fails(run: Run, amount: int) -> None:
    """An exception of the caller's own body reaches the caller as it is, and the handler never sees an end."""

    async def body() -> AsyncIterator[bytes]:
        yield bytes(amount)
        raise LookupError("mine")

    async def main() -> None:
        async with Node() as one, Node() as two:
            with pytest.raises(LookupError, match="mine"):
                await ask(one, two.address, "count", b"", body())
            async with asyncio.timeout(5):
                await two.cancelled.wait()
            assert two.log.events == []

    run(main())


def test_silence_is_a_timeout(run: Run) -> None:
    """A handler that does not answer is a `timeout` after the caller's patience, and is cancelled."""

    async def main() -> None:
        async with Node() as one, Node() as two:
            started = time.monotonic()
            error = await failure(ask(one, two.address, "hang", timeout_s=0.3))
            assert error.kind == "timeout"
            assert 0.25 < time.monotonic() - started < 3
            async with asyncio.timeout(5):
                await two.cancelled.wait()

    run(main())


def test_upload_that_is_not_taken_is_a_timeout(run: Run) -> None:
    """A peer that stops reading our body is a `timeout`, and the body's generator is closed."""

    async def main() -> None:
        closed = asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield bytes(MB)
            finally:
                closed.set()

        async with Node() as one, Node() as two:
            error = await failure(ask(one, two.address, "hang", b"", body(), timeout_s=0.5))
            assert error.kind == "timeout"
            assert closed.is_set()

    run(main())


def test_progress_is_not_silence(run: Run) -> None:
    """A slow answer and a slow body pass while every single wait is shorter than the limit."""

    async def main() -> None:
        async with Node() as one, Node() as two:
            _, body = await ask(one, two.address, "trickle", timeout_s=0.5)
            assert body == b"x" * 20
            head, _ = await ask(one, two.address, "count", b"", trickle(), timeout_s=0.5)
            assert head == b"20"

    run(main())


def test_leaving_early_cancels_the_handler(run: Run) -> None:
    """Leaving the block with the answer unread closes the body's generator at the other end."""

    async def main() -> None:
        async with Node() as one, Node() as two:
            async with asyncio.timeout(10):
                async with one.door.request(two.address, "give", str(500 * MB).encode(), timeout_s=5):
                    pass
                task = asyncio.ensure_future(ask(one, two.address, "hang"))
                await two.hanging.wait()
                task.cancel()
                await two.cancelled.wait()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    run(main())


def test_a_cancellation_while_an_upload_ends_is_not_swallowed(run: Run) -> None:
    """The body takes its time to close, and the asking task is cancelled meanwhile: it ends as cancelled."""

    async def main() -> None:
        closing, go_on = asyncio.Event(), asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield bytes(MB)
            finally:
                closing.set()
                await go_on.wait()

        async def asks(one: Node, two: Node) -> None:
            with contextlib.suppress(TransportError):
                await ask(one, two.address, "refuse", b"", body())
            raise AssertionError("it was cancelled, and went on")

        async with Node() as one, Node() as two:
            task = asyncio.ensure_future(asks(one, two))
            async with asyncio.timeout(5):
                await closing.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            go_on.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    run(main())


@pytest.mark.parametrize("size", [10, 3 * MB])
def test_restarted_peer_on_the_same_port(run: Run, size: int) -> None:
    """An idle connection that the peer closed by restarting does not cost a request, if its body can be repeated."""

    async def main() -> None:
        async with Node() as one:
            two = Node()
            async with two:
                assert await ask(one, two.address, "echo", b"1") == (b"1", b"")
            async with Node(LOCAL, two.address.port) as again:
                head, _ = await ask(one, again.address, "count", b"", [bytes(size)])
                assert head == str(size).encode()

    run(main())


def test_closing_during_a_transfer(run: Run) -> None:
    """A peer that closes in mid-body is a `reset`; our own closing is `closed`; both within a second."""

    async def main() -> None:
        for closes in ("peer", "self"):
            async with Node() as one, Node() as two:

                async def transfer(one: Node, two: Node, started: asyncio.Event) -> None:
                    async with one.door.request(two.address, "give", str(2000 * MB).encode(), timeout_s=5) as answer:
                        async for _ in answer.body:
                            started.set()
                            await asyncio.sleep(0.001)

                started = asyncio.Event()
                task = asyncio.ensure_future(transfer(one, two, started))
                await started.wait()
                began = time.monotonic()
                await (two if closes == "peer" else one).door.close()
                assert time.monotonic() - began < 1.0
                error = await failure(task)
                assert error.kind == ("reset" if closes == "peer" else "closed")

    run(main())


def test_closed_transport(run: Run) -> None:
    """After `close`, which may be called again, requests are `closed` and datagrams are dropped."""

    async def main() -> None:
        async with Node() as one, Node() as two:
            await one.door.close()
            await one.door.close()
            assert (await failure(ask(one, two.address, "echo"))).kind == "closed"
            one.door.send(two.address, b"nothing")

    run(main())


# --- strangers ----------------------------------------------------------------------------------------------------

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def stranger(talk: Talk) -> AsyncIterator[Address]:
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
        async with asyncio.timeout(5):
            await done.wait()


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


async def _liar(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nX-P2PNode: 1\r\nContent-Length: 4\r\n\r\n\xff\xff\xff\xff")
    await writer.drain()


async def _short(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nX-P2PNode: 1\r\nContent-Length: 100\r\n\r\n\0\0\0\x01hbody")
    await writer.drain()


async def _hang_up(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")


async def _mute(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    await reader.read()


@pytest.mark.parametrize(
    ("talk", "kind"),
    [
        (_plain_http, "foreign"),
        (_redirect, "foreign"),
        (_garbage, "foreign"),
        (_liar, "foreign"),
        (_short, "reset"),
        (_hang_up, "reset"),
        (_mute, "timeout"),
    ],
)
def test_strangers(run: Run, talk: Talk, kind: str) -> None:
    """Whatever answers, or does not, has its own name among the failures."""

    async def main() -> None:
        async with Node() as one, stranger(talk) as address:
            assert (await failure(ask(one, address, "echo", timeout_s=0.5))).kind == kind

    run(main())


JUNK = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /p2p/echo HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n\0\0\0\0",
    b"POST /p2p/echo HTTP/1.1\r\nHost: x\r\nX-P2PNode: 1\r\nContent-Length: 4\r\n\r\n\xff\xff\xff\xff",
    b"POST /p2p/echo HTTP/1.1\r\nHost: x\r\nX-P2PNode: 1\r\nContent-Length: 2\r\n\r\n\0\0",
    b"POST /p2p/echo HTTP/1.1\r\nHost: x\r\nX-P2PNode: 1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"A" * 100_000,
    b"\r\n" * 1000,
    bytes(range(256)) * 100,
]


@pytest.mark.parametrize("junk", JUNK, ids=range(len(JUNK)))
def test_junk_at_the_port(run: Run, junk: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    """Junk at the stream port ends its own connection only, says nothing on the terminal, and the node goes on."""

    async def main() -> None:
        async with Node() as one, Node() as two:
            reader, writer = await asyncio.open_connection(*two.address)
            writer.write(junk)
            with contextlib.suppress(ConnectionError):
                writer.write_eof()
                async with asyncio.timeout(5):
                    await reader.read()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            assert await ask(one, two.address, "echo", b"well") == (b"well", b"")

    run(main())
    assert capfd.readouterr().err == ""


# --- ports --------------------------------------------------------------------------------------------------------


def free_port() -> int:
    """A port that nobody holds, neither for TCP nor for UDP."""
    while True:
        with socket.socket() as stream, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
            stream.bind((LOCAL, 0))
            port = int(stream.getsockname()[1])
            with contextlib.suppress(OSError):
                datagrams.bind((LOCAL, port))
                return port


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM], ids=["TCP", "UDP"])
def test_port_in_use(run: Run, kind: socket.SocketKind) -> None:
    """A port that another socket holds, for either protocol, is `PortInUse` and names the protocol."""

    async def main() -> None:
        with socket.socket(socket.AF_INET, kind) as holder:
            holder.bind((LOCAL, free_port()))
            if kind == socket.SOCK_STREAM:
                holder.listen()
            node = Node(LOCAL, holder.getsockname()[1])
            with pytest.raises(PortInUse, match="TCP" if kind == socket.SOCK_STREAM else "UDP"):
                await node.__aenter__()
            await node.door.close()

    run(main())


def test_an_address_that_is_not_ours(run: Run) -> None:
    """An address of no interface is an `OSError`, not a port in use."""

    async def main() -> None:
        with pytest.raises(OSError, match=r"(?i)assign"):
            await Node("192.0.2.1", 0).__aenter__()

    run(main())


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback on this machine")
def test_ipv6_loopback(run: Run) -> None:
    """Requests and datagrams pass over IPv6."""

    async def main() -> None:
        async with Node("::1") as one, Node("::1") as two:
            assert await ask(one, two.address, "echo", b"six") == (b"six", b"")
            one.door.send(two.address, b"hello")
            async with asyncio.timeout(5):
                assert await two.datagrams.get() == (b"hello", one.address)
            assert two.sources[0].host == "::1"

    run(main())


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback on this machine")
def test_dual_stack(run: Run) -> None:
    """A node on "::" is reached over IPv4, sees IPv4 sources as IPv4, and can answer them."""

    async def main() -> None:
        async with Node() as one, Node("::") as both:
            assert await ask(one, Address(LOCAL, both.address.port), "echo", b"4") == (b"4", b"")
            assert both.sources[0].host == LOCAL
            one.door.send(Address(LOCAL, both.address.port), b"ping")
            async with asyncio.timeout(5):
                data, source = await both.datagrams.get()
                assert (data, source) == (b"ping", one.address)
                both.door.send(source, b"pong")
                assert (await one.datagrams.get())[0] == b"pong"
            assert await ask(both, one.address, "echo", b"back") == (b"back", b"")

    run(main())
