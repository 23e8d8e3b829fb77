"""A connection without a socket: reading, filling, pausing, writing, timeouts and closing."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from p2pnode.overlay.sockets.connection import (
    BUFFER_BYTES,
    DIRECT_READ_BYTES,
    GATHERED_BYTES,
    Connection,
    ConnectionClosed,
)
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.unit.overlay.sockets.wire import SocketWire, Wire


@run_by(asyncio.run)
async def test_what_nobody_reads_is_bounded() -> None:
    """Without a reader, reading pauses with a full buffer; the rest arrives when the caller reads."""
    data = bytes(range(256)) * (3 * BUFFER_BYTES // 256)
    wire = Wire(data, [1000])
    for _ in range(200):
        await asyncio.sleep(0)
    assert not wire.reads
    assert BUFFER_BYTES <= wire.connection.unread < BUFFER_BYTES + 1000
    target = bytearray(len(data))
    await wire.connection.fill(memoryview(target))
    assert target == data
    await wire.stop()


@run_by(asyncio.run)
async def test_a_small_message_is_gathered_in_one_wait() -> None:
    """More than the buffer of a connection that nobody reads; what comes after it is bounded as before."""
    data = bytes(GATHERED_BYTES + 4 * BUFFER_BYTES)
    wire = Wire(data, [1000])
    await wire.connection.gather(GATHERED_BYTES)
    assert GATHERED_BYTES <= wire.connection.unread < GATHERED_BYTES + 1000
    for _ in range(200):
        await asyncio.sleep(0)
    assert wire.connection.unread < GATHERED_BYTES + 1000
    del wire.connection.buffered[:]
    for _ in range(200):
        await asyncio.sleep(0)
    assert wire.connection.unread == 0
    assert await wire.connection.read(10) == bytes(10)
    for _ in range(200):
        await asyncio.sleep(0)
    assert BUFFER_BYTES <= wire.connection.unread < BUFFER_BYTES + 1000
    await wire.stop()
    wire = Wire(b"half")
    await wire.connection.gather(100)  # the end comes before
    assert wire.connection.unread == 4
    await wire.stop()


@pytest.mark.parametrize("wait", ["gather", "read"])
@run_by(run)
async def test_many_waits_share_a_timer_and_each_has_its_own_time(wait: str) -> None:
    """A wait that follows others at once ends after its own silence, also if theirs was to be longer."""
    loop, wire = asyncio.get_running_loop(), Wire()
    wire._task.cancel()  # nothing comes by itself, and the connection stays open
    connection = wire.connection

    async def once(timeout_s: float) -> None:
        if wait == "gather":
            await connection.gather(1, timeout_s)
        else:
            await connection.read(1, timeout_s)

    for quick_s, timeout_s in ((80.0, 8.0), (8.0, 80.0), (80.0, 0.8), (0.8, 0.8)):
        for _ in range(3):
            task = asyncio.ensure_future(once(quick_s))
            await asyncio.sleep(quick_s / 100)
            connection.get_buffer(-1)[:1] = b"x"
            connection.buffer_updated(1)
            await task
            del connection.buffered[:]
        began_s = loop.time()
        with pytest.raises(TimeoutError):
            await once(timeout_s)
        assert 0.99 * timeout_s <= loop.time() - began_s <= 1.02 * timeout_s
    wire.close_now()


@run_by(asyncio.run)
async def test_callbacks_and_state() -> None:
    """`on_open` and `on_close` are called once each, and a lost connection has ended."""
    calls: list[str] = []
    connection = Connection(lambda _: calls.append("open"), lambda _: calls.append("close"))
    assert connection.has_ended
    wire = Wire()
    connection.connection_made(wire)
    assert not connection.has_ended
    connection.connection_lost(OSError("reset by peer"))
    assert connection.has_ended
    assert calls == ["open", "close"]
    with pytest.raises(ConnectionClosed, match="reset by peer"):
        await connection.read(1)
    await wire.stop()


@run_by(run, limit_s=60)
async def test_a_drain_waits_until_writing_resumes() -> None:
    """A paused writer waits; it continues when the loop resumes it, and fails if the connection is lost instead."""
    wire = Wire()
    await wire.stop()
    connection = wire.connection
    connection.pause_writing()
    draining = asyncio.ensure_future(connection.drain())
    await asyncio.sleep(0)
    assert connection.has_waiter
    connection.resume_writing()
    await draining
    connection.pause_writing()
    with pytest.raises(TimeoutError):
        await connection.drain(0.5)
    draining = asyncio.ensure_future(connection.drain())
    await asyncio.sleep(0)
    wire.close_now()
    with pytest.raises(ConnectionClosed):
        await draining


@run_by(run, limit_s=60)
async def test_slow_bytes_do_not_time_out() -> None:
    """The idle timeout restarts with every byte, and expires when no more bytes arrive."""
    wire = Wire(b"", [])
    await wire.stop()
    connection = wire.connection
    loop = asyncio.get_running_loop()
    target = memoryview(bytearray(DIRECT_READ_BYTES))

    def drop(left: int) -> None:
        connection.get_buffer(-1)[:1] = b"x"
        connection.buffer_updated(1)
        if left:
            loop.call_later(0.05, drop, left - 1)

    drop(8)
    began = loop.time()
    with pytest.raises(TimeoutError):
        await connection.fill(target, 0.12)
    assert 0.5 < loop.time() - began < 0.7
    assert bytes(target[:9]) == b"x" * 9


class Socket:
    """Records what is set; refuses where the kernel would."""

    def __init__(self, *, allows: bool) -> None:
        self.allows = allows
        self.options: list[tuple[Any, ...]] = []

    def setsockopt(self, *option: Any) -> None:
        self.options.append(option)
        if not self.allows:
            raise PermissionError("not an allowed congestion control")


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="this system has one congestion control")
@pytest.mark.parametrize(("host", "is_asked"), [("192.0.2.7", True), ("127.0.0.1", False), ("::1", False)])
@pytest.mark.parametrize("allows", [True, False])
@run_by(asyncio.run)
async def test_bbr_is_asked_for_beyond_the_loopback(host: str, is_asked: bool, allows: bool) -> None:
    """A connection to another machine asks for the control that keeps queues short, and goes on where it is refused."""
    wire, sock = SocketWire(), Socket(allows=allows)
    wire._extra.update(socket=sock, peername=(host, 9))
    Connection().connection_made(wire)
    wanted = [(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")]
    assert sock.options == (wanted if is_asked else [])
