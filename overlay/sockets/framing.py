"""The framing of messages on HTTP streams: how bodies are written in slices, and when a sender may reuse its buffer.

A message is `u32 length (big endian) + head`, then the raw body, in both directions. Bodies are written in slices
(`SendQueue.slice_bytes`) with a yield after each, because a write to a fast peer does not yield. Both were measured
with bodies of 100 MB.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Generator, Iterable

from p2pnode.overlay.errors import OverlayError
from p2pnode.overlay.sockets.connection import Connection
from p2pnode.overlay.sockets.http1 import HttpBody
from p2pnode.overlay.transport import MAX_HEAD_BYTES, Body, Buffer, SizedBody

LENGTH_BYTES = 4
#: A chunk up to this size is copied if its memory may change. For a longer one the writer waits until the kernel has
#: it.
COPY_BYTES = 1 << 16
#: A message up to this size is sent in one write.
SMALL_MESSAGE_BYTES = 1 << 16
#: Memory for a head is allocated in pieces of this size.
HEAD_READ_BYTES = 1 << 16


class BadFraming(OverlayError):
    """The received bytes are no head and body."""


class BodyReader:
    """Reads a message: `head()` first, then the body as an asynchronous iterator or with `read_into`.

    `map_error` turns what the stream raises into the error for the reader.
    """

    def __init__(self, body: HttpBody, map_error: Callable[[Exception], Exception]) -> None:
        self._body = body
        self._map_error = map_error
        self.broken = False

    @property
    def received_bytes(self) -> int:
        """See `overlay.transport.CountedBody`; with the bytes of the framing."""
        return self._body.received_bytes

    async def head(self) -> bytes:
        """The head. Raises `BadFraming` if it is incomplete or longer than `MAX_HEAD_BYTES`."""
        length_bytes = bytearray(LENGTH_BYTES)
        if await self.read_into(memoryview(length_bytes)) < LENGTH_BYTES:
            raise BadFraming("ended before its head")
        length = int.from_bytes(length_bytes, "big")
        if length > MAX_HEAD_BYTES:
            raise BadFraming(f"announced a head of {length} bytes; at most {MAX_HEAD_BYTES} are read")
        # Memory grows with the bytes that arrive, not with the announced length.
        data = bytearray()
        while len(data) < length:
            piece = bytearray(min(length - len(data), HEAD_READ_BYTES))
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
            raise self._map_error(error) from error
        if not data:
            raise StopAsyncIteration
        return data

    async def read_into(self, target: memoryview) -> int:
        """See `overlay.transport.DirectBody`."""
        try:
            return await self._body.fill(target)
        except Exception as error:
            self.broken = True
            raise self._map_error(error) from error


class WholeBody:
    """A body that has arrived with its head; read as `BodyReader` is."""

    __slots__ = ("_left", "received_bytes")

    def __init__(self, data: bytes) -> None:
        self._left = memoryview(data)
        #: See `overlay.transport.CountedBody`.
        self.received_bytes = len(data)

    def __aiter__(self) -> WholeBody:
        return self

    async def __anext__(self) -> Buffer:
        if not len(self._left):
            raise StopAsyncIteration
        data, self._left = self._left, self._left[:0]
        return bytes(data)

    def take(self, size_bytes: int) -> memoryview:
        """See `overlay.transport.ArrivedBody`."""
        piece = self._left[:size_bytes]
        self._left = self._left[size_bytes:]
        return piece

    async def read_into(self, target: memoryview) -> int:
        """See `overlay.transport.DirectBody`."""
        count = min(len(target), len(self._left))
        target[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


#: The head and the body of a message.
WholeMessage = tuple[bytes, WholeBody]


def take_whole(connection: Connection, size_bytes: int | None) -> WholeMessage | None:
    """Head and body of a message of so many bytes, if all of it is here; otherwise, and if it is malformed, nothing is
    taken. A message that came as a whole is read without waiting, and costs a fraction of one that is read in parts."""
    if size_bytes is None or not LENGTH_BYTES <= size_bytes <= connection.unread:
        return None
    end = LENGTH_BYTES + int.from_bytes(connection.peek(LENGTH_BYTES), "big")
    if end > size_bytes:
        return None
    message = connection.take(size_bytes)
    return message[LENGTH_BYTES:end], WholeBody(message[end:])


def framed(head: bytes) -> bytes:
    """The head after its length."""
    return len(head).to_bytes(LENGTH_BYTES, "big") + head


def chunk(data: bytes) -> bytes:
    """One chunk of the chunked transfer coding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def known_size(body: Body) -> int | None:
    """The size of a body that is a list or has a `size_bytes`; None for one that is produced while it is sent."""
    if isinstance(body, SizedBody):
        return body.size_bytes
    return sum(memoryview(chunk).nbytes for chunk in body) if isinstance(body, list | tuple) else None


def small_message(head: bytes, body: Body) -> bytes | None:
    """The whole message as one buffer, if it is small and the body is a list; else None."""
    length = len(head)
    if not isinstance(body, list | tuple) or length + sum(map(len, body)) > SMALL_MESSAGE_BYTES:
        return None
    message = b"".join((length.to_bytes(LENGTH_BYTES, "big"), head, *body))
    return message if len(message) <= SMALL_MESSAGE_BYTES + LENGTH_BYTES else None  # a view may count larger items


class BodyFailed(OverlayError):
    """The body's own iterator raised `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"the body could not be produced: {error!r}")
        self.error = error


class BodyWriter:
    """Gets the chunks of a synchronous or asynchronous body.

    Not an asynchronous generator: the loop would close one that is left early in a task of its own, at any later time.
    """

    def __init__(self, body: Body) -> None:
        self._async = body.__aiter__() if isinstance(body, AsyncIterable) else None
        #: Whether the next chunk may take time.
        self.waits = self._async is not None
        self._sync = iter(body) if isinstance(body, Iterable) and self._async is None else None

    async def next(self) -> Buffer | None:
        """The next chunk that is not empty; None at the end. Raises `BodyFailed`."""
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
        """Close a body that was not read to its end, so that its cleanup runs within the request. Beside a generator
        that is any object with `aclose`: a generator that was never read has no cleanup."""
        if (aclose := getattr(self._async, "aclose", None)) is not None:
            await aclose()
        elif isinstance(self._sync, Generator):
            self._sync.close()


async def write_body(
    connection: Connection,
    beginning: bytes,
    body: BodyWriter,
    *,
    in_chunks: bool,
    idle_timeout_s: float | None = None,
    pauses_timeouts: bool = False,
) -> None:
    """Write `beginning`, then the body slice by slice, in HTTP chunks if `in_chunks`.

    `idle_timeout_s` bounds the silence of each write. With `pauses_timeouts` no wait on this connection times out while
    the body produces its next chunk. Raises `BodyFailed` and what `Connection.drain` raises.
    """
    slice_bytes = connection.sent.slice_bytes
    #: Small pieces are collected, so that each system call writes many bytes.
    pieces: list[Buffer] = []
    size = 0

    async def flush() -> None:
        nonlocal size
        connection.write(pieces)
        pieces.clear()
        size = 0
        await connection.drain(idle_timeout_s)
        # A write to a fast peer does not yield: without this, a large body would block the loop.
        await asyncio.sleep(0)

    pieces.append(beginning)
    while True:
        if body.waits and pieces:
            await flush()
        connection.is_producing = pauses_timeouts
        try:
            given = await body.next()
        finally:
            connection.is_producing = False
        if given is None:
            break
        view = memoryview(given).cast("B")
        if not isinstance(given, bytes) and len(view) <= COPY_BYTES:
            view = memoryview(bytes(view))
        if in_chunks:
            pieces.append(b"%x\r\n" % len(view))
        for start in range(0, len(view), slice_bytes):
            piece = view[start : start + slice_bytes]
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
