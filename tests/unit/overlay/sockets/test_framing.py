"""The framing of messages: heads and bodies as bytes, the slices of a body, and errors of either end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from p2pnode.overlay.sockets.connection import Connection
from p2pnode.overlay.sockets.framing import (
    COPY_BYTES,
    SMALL_MESSAGE_BYTES,
    BadFraming,
    BodyFailed,
    BodyReader,
    BodyWriter,
    chunk,
    framed,
    known_size,
    small_message,
    write_body,
)
from p2pnode.overlay.sockets.http1 import HttpBody
from p2pnode.overlay.sockets.send_queue import SLICE_BYTES, SMALL_SLICE_BYTES, Probe, SendQueue, acknowledged_by_count
from p2pnode.overlay.transport import MAX_HEAD_BYTES, Body, SizedBody
from tests.unit.overlay.sockets.wire import SocketWire, Wire


class Sink(Connection):
    """A connection that keeps a copy of every write. `count`: what counts the acknowledged bytes."""

    def __init__(self, count: Probe | None = acknowledged_by_count) -> None:
        super().__init__()
        self._sent = SendQueue(SocketWire(), count, None)
        self.writes: list[bytes] = []
        self.drains = 0

    def write(self, pieces: Any) -> None:
        self.writes.append(b"".join(pieces))

    async def drain(self, idle_timeout_s: float | None = None) -> None:
        del idle_timeout_s
        self.drains += 1


def written(body: Body, *, in_chunks: bool = False, count: Probe | None = acknowledged_by_count) -> Sink:
    async def main() -> Sink:
        sink = Sink(count)
        await write_body(sink, b"begin", BodyWriter(body), in_chunks=in_chunks)
        return sink

    return asyncio.run(main())


def views(buffer: bytearray, values: bytes) -> Iterator[memoryview]:
    """Views of one buffer that is overwritten for each."""
    for value in values:
        buffer[:] = bytes([value]) * len(buffer)
        yield memoryview(buffer)


async def produced(*chunks: bytes) -> AsyncIterator[bytes]:
    for data in chunks:
        await asyncio.sleep(0)
        yield data


def test_golden_framing() -> None:
    """A head has its length before it, and a chunk its size in hexadecimal digits."""
    assert framed(b"head") == b"\0\0\0\4head"
    assert chunk(b"x" * 26) == b"1a\r\n" + b"x" * 26 + b"\r\n"


def test_known_sizes() -> None:
    """Lists and sized bodies have a size, generators have none; a small list is one message."""
    numbers = memoryview(bytearray(8)).cast("f")

    assert known_size([b"ab", numbers]) == 10
    assert known_size(SizedBody(iter([b"abc"]), 3)) == 3
    assert known_size(iter([b"abc"])) is None
    assert small_message(b"head", [b"ab", b"c"]) == b"\0\0\0\4headabc"
    assert small_message(b"head", iter([b"abc"])) is None
    assert small_message(b"head", [bytes(SMALL_MESSAGE_BYTES)]) is None


def test_small_chunks_are_collected_and_copied() -> None:
    """Small views of a reused buffer go out together in one write, each with its own contents."""
    sink = written(views(bytearray(10), b"abc"))

    assert sink.writes == [b"begin" + b"a" * 10 + b"b" * 10 + b"c" * 10]


def test_a_large_chunk_is_written_in_slices() -> None:
    """Each slice is written and drained before the body is asked for its next chunk, so its buffer may be reused."""
    size = 2 * SLICE_BYTES + COPY_BYTES
    sink = written(views(bytearray(size), b"ab"))

    assert [len(data) for data in sink.writes] == [SLICE_BYTES + 5, SLICE_BYTES, COPY_BYTES] + [
        SLICE_BYTES,
        SLICE_BYTES,
        COPY_BYTES,
    ]
    assert b"".join(sink.writes) == b"begin" + b"a" * size + b"b" * size
    assert sink.drains == len(sink.writes)


def test_chunked_bodies() -> None:
    """Each chunk of an asynchronous body is an HTTP chunk, empty ones are left out, and the last one ends the body."""
    sink = written(produced(b"abc", b"", b"de"), in_chunks=True)

    assert b"".join(sink.writes) == b"begin3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"


@pytest.mark.parametrize("pauses", [True, False])
def test_timeouts_pause_while_the_body_is_produced(pauses: bool) -> None:
    """A request's body may take its time, and a response's body must not keep a silent request alive."""
    seen: list[bool] = []
    sink: list[Sink] = []

    async def body() -> AsyncIterator[bytes]:
        seen.append(sink[0].is_producing)
        yield b"abc"
        seen.append(sink[0].is_producing)

    async def main() -> None:
        sink.append(Sink())
        await write_body(sink[0], b"", BodyWriter(body()), in_chunks=True, pauses_timeouts=pauses)
        assert seen == [pauses, pauses]
        assert not sink[0].is_producing

    asyncio.run(main())


def test_slices_are_small_where_acknowledgements_are_not_counted() -> None:
    """Nothing is known of a slice in the kernel's buffer there, so that a slice must not take long."""
    sink = written([bytes(3 * SMALL_SLICE_BYTES)], count=None)
    assert [len(data) for data in sink.writes] == [SMALL_SLICE_BYTES + 5] + [SMALL_SLICE_BYTES] * 2


def test_a_body_that_raises() -> None:
    """The error of the body's iterator is kept in `BodyFailed`, and a generator is closed by `close`."""
    closed = []

    def failing() -> Iterator[bytes]:
        try:
            yield b"abc"
            raise LookupError("mine")
        finally:
            closed.append("failing")

    def left() -> Iterator[bytes]:
        try:
            yield b"abc"
            yield b"def"
        finally:
            closed.append("left")

    async def main() -> None:
        with pytest.raises(BodyFailed) as caught:
            await write_body(Sink(), b"", BodyWriter(failing()), in_chunks=False)
        assert isinstance(caught.value.error, LookupError)
        writer = BodyWriter(left())
        assert await writer.next() == b"abc"
        await writer.close()
        assert closed == ["failing", "left"]

    asyncio.run(main())


def reader_of(data: bytes, **options: Any) -> tuple[Wire, BodyReader]:
    wire = Wire(data, [7])
    return wire, BodyReader(HttpBody(wire.connection, len(data), 5.0), lambda error: error, **options)


def test_reading_head_and_body() -> None:
    """The head comes first, then the body, as buffers or into the caller's memory."""

    async def main() -> None:
        wire, reader = reader_of(framed(b"head") + b"body")
        assert await reader.head() == b"head"
        assert b"".join([bytes(data) async for data in reader]) == b"body"
        await wire.stop()
        wire, reader = reader_of(framed(b"head") + b"body")
        assert await reader.head() == b"head"
        target = bytearray(10)
        assert await reader.read_into(memoryview(target)) == 4
        assert target[:4] == b"body"
        await wire.stop()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\0\0", "ended before its head"),
        (b"\0\0\0\5head", "ended within its head"),
        ((MAX_HEAD_BYTES + 1).to_bytes(4, "big") + b"x", "at most"),
    ],
)
def test_bad_framing(data: bytes, message: str) -> None:
    """A message without a whole head, and a head above the limit, are refused."""

    async def main() -> None:
        wire, reader = reader_of(data)
        with pytest.raises(BadFraming, match=message):
            await reader.head()
        await wire.stop()

    asyncio.run(main())


def test_errors_of_the_stream_are_mapped() -> None:
    """What the stream raises reaches the reader as `map_error` has it, and the reader is marked as broken."""

    async def main() -> None:
        wire = Wire(framed(b"head") + b"bo")
        reader = BodyReader(HttpBody(wire.connection, 20, 5.0), lambda _error: LookupError("mapped"))
        assert await reader.head() == b"head"
        with pytest.raises(LookupError, match="mapped"):
            assert [data async for data in reader] == []
        assert reader.broken
        with pytest.raises(LookupError, match="mapped"):
            await reader.read_into(memoryview(bytearray(3)))
        await wire.stop()

    asyncio.run(main())
