"""How a body travels on an HTTP stream: its framing, its slices, and when a sender's buffer may be reused.

Either way a message is `u32 length (big endian) + head`, then the raw body. The rules come from measurements (100 MB
bodies): write slices of 1 MiB, and yield after each, because a write to a peer that keeps up does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Generator, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext

from overlay.errors import OverlayError
from overlay.sockets.connection import Connection
from overlay.sockets.http1 import HttpBody
from overlay.transport import MAX_HEAD_BYTES, Body, Buffer, SizedBody

LENGTH_BYTES = 4
#: Largest piece written at once.
SLICE_BYTES = 1 << 20
#: A piece up to this long is copied if its memory may change; a longer one is waited for until the kernel has it.
COPY_BYTES = 1 << 16
#: A message up to this long is sent in one write.
WHOLE_BYTES = 1 << 16
#: Memory for an announced head is taken so much at a time.
HEAD_PIECE_BYTES = 1 << 16


class BadFraming(OverlayError):
    """The peer's bytes are not a head and a body."""


class BodyReader:
    """An incoming message: `head()` first, then an asynchronous iterator of the body's buffers, or `read_into`.

    `translate` turns whatever the stream raises into the error for the one who reads.
    """

    def __init__(
        self,
        body: HttpBody,
        translate: Callable[[Exception], Exception],
        *,
        small_head_bytes: int = MAX_HEAD_BYTES,
        large_head: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        """A head above `small_head_bytes` is read inside `large_head()`, which may wait or refuse."""
        self._body = body
        self._translate = translate
        self._small_head_bytes = small_head_bytes
        self._large_head = large_head
        self.broken = False

    async def head(self) -> bytes:
        """The head. Raises `BadFraming` when it is cut short or longer than `MAX_HEAD_BYTES`."""
        length_bytes = bytearray(LENGTH_BYTES)
        if await self.read_into(memoryview(length_bytes)) < LENGTH_BYTES:
            raise BadFraming("ended before its head")
        length = int.from_bytes(length_bytes, "big")
        if length > MAX_HEAD_BYTES:
            raise BadFraming(f"announced a head of {length} bytes; at most {MAX_HEAD_BYTES} are read")
        if length <= self._small_head_bytes:
            return await self._read_head(length)
        async with self._large_head():
            return await self._read_head(length)

    async def _read_head(self, length: int) -> bytes:
        # Grows with what arrives, never with what was announced.
        data = bytearray()
        while len(data) < length:
            piece = bytearray(min(length - len(data), HEAD_PIECE_BYTES))
            if await self.read_into(memoryview(piece)) < len(piece):
                raise BadFraming("ended within its head")
            data += piece
        return bytes(data)

    def __aiter__(self) -> BodyReader:
        return self

    async def __anext__(self) -> Buffer:
        try:
            data = await self._body.read()
        except Exception as error:
            self.broken = True
            raise self._translate(error) from error
        if not data:
            raise StopAsyncIteration
        return data

    async def read_into(self, target: memoryview) -> int:
        """See `overlay.transport.DirectBody`."""
        try:
            return await self._body.fill(target)
        except Exception as error:
            self.broken = True
            raise self._translate(error) from error


def framed(head: bytes) -> bytes:
    """The head with its length before it."""
    return len(head).to_bytes(LENGTH_BYTES, "big") + head


def chunk(data: bytes) -> bytes:
    """One chunk of a body that comes in chunks."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def known_size(body: Body) -> int | None:
    """Bytes of a body that stands already, or says so; None for another that is produced while it is sent."""
    if isinstance(body, SizedBody):
        return body.size_bytes
    return sum(memoryview(chunk).nbytes for chunk in body) if isinstance(body, list | tuple) else None


def small_message(head: bytes, body: Body) -> bytes | None:
    """The whole message, where it is small and stands already."""
    size = known_size(body)
    if size is None or size + len(head) > WHOLE_BYTES or not isinstance(body, list | tuple):
        return None
    return b"".join((framed(head), *body))


class BodyFailed(OverlayError):
    """The sender's own iterator raised `error` while its body was being sent."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"the body could not be produced: {error!r}")
        self.error = error


class BodyWriter:
    """Either kind of body, asked for one chunk after the other. Not a generator: one that is left in the middle is
    finished by a task of the loop's, at a moment nobody chose."""

    def __init__(self, body: Body) -> None:
        self._async = body.__aiter__() if isinstance(body, AsyncIterable) else None
        #: Whether to ask for the next chunk may take time.
        self.waits = self._async is not None
        self._sync = iter(body) if isinstance(body, Iterable) and self._async is None else None

    async def next(self) -> Buffer | None:
        """The next chunk that is not empty, None at the end. Raises `BodyFailed`."""
        try:
            while True:
                if self._async is not None:
                    chunk = await anext(self._async, None)
                else:
                    assert self._sync is not None
                    chunk = next(self._sync, None)
                if chunk is None or len(chunk):
                    return chunk
        except Exception as error:
            raise BodyFailed(error) from error

    async def close(self) -> None:
        """Close a generator that was not read to its end: its cleanup belongs to the request."""
        if isinstance(self._async, AsyncGenerator):
            await self._async.aclose()
        elif isinstance(self._sync, Generator):
            self._sync.close()


async def write_body(
    connection: Connection,
    beginning: bytes,
    body: BodyWriter,
    *,
    in_chunks: bool,
    silence_s: float | None = None,
    on_asking: Callable[[], None] | None = None,
    on_progress: Callable[[], None] | None = None,
) -> None:
    """Write `beginning` as it is, then a body slice by slice, `in_chunks` as HTTP has them. Raises `BodyFailed`, and
    what `Connection.drain` raises.

    `silence_s` bounds each write (`TimeoutError`). `on_asking` is called before the body is asked for its next chunk,
    `on_progress` whenever there is something to write again.
    """
    asking, progress = on_asking or _nothing, on_progress or _nothing
    #: Small pieces wait for the next large one, so that each system call has something to do.
    pieces: list[Buffer] = []
    size = 0

    async def flush() -> None:
        nonlocal size
        connection.write(pieces)
        pieces.clear()
        size = 0
        await connection.drain(silence_s)
        progress()
        # A write does not yield while the peer keeps up: the loop would lag by whole deltas.
        await asyncio.sleep(0)

    pieces.append(beginning)
    while True:
        if body.waits and pieces:
            await flush()
        asking()
        given = await body.next()
        progress()
        if given is None:
            break
        view = memoryview(given).cast("B")
        if not isinstance(given, bytes) and len(view) <= COPY_BYTES:
            view = memoryview(bytes(view))
        if in_chunks:
            pieces.append(b"%x\r\n" % len(view))
        for start in range(0, len(view), SLICE_BYTES):
            piece = view[start : start + SLICE_BYTES]
            pieces.append(piece)
            size += len(piece)
            if size >= COPY_BYTES or len(view) > COPY_BYTES:
                await flush()
        if in_chunks:
            pieces.append(b"\r\n")
    if in_chunks:
        pieces.append(b"0\r\n\r\n")
    if pieces:
        await flush()


def _nothing() -> None:
    pass
