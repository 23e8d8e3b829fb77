"""A connection without a socket: reading, filling, pausing, writing, timeouts and closing."""

from __future__ import annotations

import asyncio

import pytest

from overlay.sockets.connection import BUFFER_BYTES, DIRECT_READ_BYTES, Connection, ConnectionClosed
from tests.harness.virtual_loop import VirtualLoop
from tests.unit.overlay.sockets.wire import Wire


def test_what_nobody_reads_is_bounded() -> None:
    """Without a reader, reading pauses with a full buffer; the rest arrives when the caller reads."""

    async def main() -> None:
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

    asyncio.run(main())


def test_reading_lines() -> None:
    """A line ends at its separator, the end of the input gives nothing, and an endless line is refused."""

    async def main() -> None:
        wire = Wire(b"one\r\ntwo\r\n", [2])
        assert [await wire.connection.read_line(20, b"\r\n") for _ in range(3)] == [b"one\r\n", b"two\r\n", b""]
        await wire.stop()
        wire = Wire(b"x" * 100)
        with pytest.raises(ValueError, match="no end within 50"):
            await wire.connection.read_line(50, b"\r\n")
        await wire.stop()
        wire = Wire(b"half")
        with pytest.raises(ConnectionClosed):
            await wire.connection.read_line(50, b"\r\n")
        await wire.stop()

    asyncio.run(main())


def test_callbacks_and_state() -> None:
    """`on_open` and `on_close` are called once each, and a lost connection has ended."""

    async def main() -> None:
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

    asyncio.run(main())


def test_a_drain_waits_until_writing_resumes() -> None:
    """A paused writer waits; it continues when the loop resumes it, and fails if the connection is lost instead."""

    async def main() -> None:
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

    VirtualLoop().run(main(), limit_s=60)


def test_slow_bytes_do_not_time_out() -> None:
    """The idle timeout restarts with every byte, and expires when no more bytes arrive."""

    async def main() -> None:
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

    VirtualLoop().run(main(), limit_s=60)
