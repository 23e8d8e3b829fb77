"""The framing of messages: heads and bodies as bytes, the slices of a body, and errors of either end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from p2pnode.overlay.sockets.connection import Connection, ConnectionClosed
from p2pnode.overlay.sockets.framing import (
    CHUNK_LENGTH,
    COPY_BYTES,
    HEADER,
    IN_CHUNKS,
    MAGIC,
    BodyFailed,
    BodyReader,
    BodyWriter,
    Frame,
    HeadTooLong,
    Kind,
    NotOurFrame,
    WholeBody,
    beginning,
    read_frame,
    read_message,
    write_body,
)
from p2pnode.overlay.sockets.send_queue import SLICE_BYTES, SMALL_SLICE_BYTES, Probe, SendQueue, acknowledged_by_count
from p2pnode.overlay.transport import MAX_HEAD_BYTES, Body
from tests.harness.runner.stories import run_by
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


def test_golden_frames() -> None:
    """Magic, kind, whether it is the last, lengths of name, head and body, name, head, body; all ones for chunks."""
    sized = beginning(Kind.REQUEST, b"head", 3, name=b"push")
    assert sized == b"p2pn\r\n\r\n" + bytes.fromhex("00 00 04 00000004 0000000000000003") + b"pushhead"
    in_chunks = beginning(Kind.OK, b"", None, is_last=True)
    assert in_chunks == b"p2pn\r\n\r\n" + bytes.fromhex("01 01 00 00000000 ffffffffffffffff")


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


@pytest.mark.parametrize("pauses", [True, False])
@run_by(asyncio.run)
async def test_timeouts_pause_while_the_body_is_produced(pauses: bool) -> None:
    """A request's body may take its time, and a response's body must not keep a silent request alive."""
    seen: list[bool] = []
    sink: list[Sink] = []

    async def body() -> AsyncIterator[bytes]:
        seen.append(sink[0].is_producing)
        yield b"abc"
        seen.append(sink[0].is_producing)

    sink.append(Sink())
    await write_body(sink[0], b"", BodyWriter(body()), in_chunks=True, pauses_timeouts=pauses)
    assert seen == [pauses, pauses]
    assert not sink[0].is_producing


def test_slices_are_small_where_acknowledgements_are_not_counted() -> None:
    """Nothing is known of a slice in the kernel's buffer there, so that a slice must not take long."""
    sink = written([bytes(3 * SMALL_SLICE_BYTES)], count=None)
    assert [len(data) for data in sink.writes] == [SMALL_SLICE_BYTES + 5] + [SMALL_SLICE_BYTES] * 2


@run_by(asyncio.run)
async def test_a_body_that_raises() -> None:
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

    with pytest.raises(BodyFailed) as caught:
        await write_body(Sink(), b"", BodyWriter(failing()), in_chunks=False)
    assert isinstance(caught.value.error, LookupError)
    writer = BodyWriter(left())
    assert await writer.next() == b"abc"
    await writer.close()
    assert closed == ["failing", "left"]


async def read_all(wire: Wire) -> tuple[Frame, bytes, bytes]:
    frame = await read_frame(wire.connection, 5.0)
    assert frame is not None
    head, body = await read_message(wire.connection, frame, 5.0)
    return frame, head, b"".join([bytes(data) async for data in body])


@pytest.mark.parametrize("size", [0, 4, 100_000])
@run_by(asyncio.run)
async def test_reading_head_and_body(size: int) -> None:
    """The head comes first, then the body, as buffers or into the caller's memory; a small body comes with its head."""
    message = beginning(Kind.REQUEST, b"head", size, name=b"push") + b"b" * size
    wire = Wire(message, [7000])
    frame, head, body = await read_all(wire)
    assert (frame.kind, frame.name, frame.is_last) == (Kind.REQUEST, "push", False)
    assert (head, body) == (b"head", b"b" * size)
    assert await read_frame(wire.connection) is None, "the peer has closed it"
    await wire.stop()
    wire = Wire(message, [7])
    found = await read_frame(wire.connection)
    assert found is not None
    _, reader = await read_message(wire.connection, found)
    assert isinstance(reader, WholeBody) == (size < 100_000)
    target = bytearray(size + 6)
    assert await reader.read_into(memoryview(target)) == size
    assert target[:size] == b"b" * size
    assert reader.is_at_end
    await wire.stop()


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nand much more", NotOurFrame),
        (b"SSH", NotOurFrame),
        (MAGIC, ConnectionClosed),
        (HEADER.pack(MAGIC, 9, False, 0, 0, 0), NotOurFrame),
        (beginning(Kind.REQUEST, b"head", 2, name=b"push")[: HEADER.size + 2], ConnectionClosed),
        (beginning(Kind.REQUEST, b"head", 2)[:-1], ConnectionClosed),
        (beginning(Kind.REQUEST, b"head", 2) + b"b", ConnectionClosed),
        (beginning(Kind.REQUEST, b"head", None) + CHUNK_LENGTH.pack(5) + b"four", ConnectionClosed),
        (HEADER.pack(MAGIC, 0, False, 0, MAX_HEAD_BYTES + 1, 0) + b"x", HeadTooLong),
        (HEADER.pack(MAGIC, 0, False, 0, 4, IN_CHUNKS - 1) + b"head", ConnectionClosed),
    ],
)
@run_by(asyncio.run)
async def test_bad_frames(data: bytes, error: type[Exception]) -> None:
    """What is cut short, of another protocol, or above the limits is refused, and takes no memory for what it says."""
    wire = Wire(data)
    with pytest.raises(error):
        await read_all(wire)
    await wire.stop()


@run_by(asyncio.run)
async def test_errors_of_the_stream_are_mapped() -> None:
    """What the stream raises reaches the reader as `map_error` has it, and the reader is marked as broken."""
    wire = Wire(b"bo")
    reader = BodyReader(wire.connection, 20, 5.0)
    reader.map_error = lambda _error: LookupError("mapped")
    assert b"".join([bytes(await anext(reader))]) == b"bo"
    with pytest.raises(LookupError, match="mapped"):
        await anext(reader)
    assert reader.broken
    with pytest.raises(LookupError, match="mapped"):
        await reader.read_into(memoryview(bytearray(3)))
    await wire.stop()
