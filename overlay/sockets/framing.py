"""The frames of requests and responses on a stream, and how bodies are written in slices.

A frame is a header, the name of the request (none in a response), the head and the body. The header has the lengths of
all of them. A body whose size is not known comes in chunks, each after its length, and ends with an empty one. Both
ends accept nothing else: anything else raises `NotOurFrame`, and the connection is closed.

Bodies are written in slices (`SendQueue.slice_bytes`) with a yield after each, because a write to a fast peer does not
yield. That was measured with bodies of 100 MB.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterable, Callable, Generator, Iterable
from enum import IntEnum
from typing import NamedTuple

from p2pnode.overlay.errors import OverlayError
from p2pnode.overlay.sockets.connection import GATHERED_BYTES, Connection, ConnectionClosed
from p2pnode.overlay.sockets.send_queue import BackgroundPace
from p2pnode.overlay.transport import MAX_HEAD_BYTES, Background, Body, Buffer, SizedBody

#: With the end of a head of HTTP, so that a server of the web answers it at once, and is known by its answer.
MAGIC = b"p2pn\r\n\r\n"
#: Magic, kind, whether it is the last on the connection, and the lengths of name, head and body.
HEADER = struct.Struct(">8sB?BIQ")
CHUNK_LENGTH = struct.Struct(">Q")
#: In the place of the length of a body that comes in chunks.
IN_CHUNKS = (1 << 64) - 1
#: Longest reason of a rejection that is sent or shown, in characters.
REASON_CHARACTERS = 2000
#: Most bytes of one read.
READ_BYTES = 1 << 16
#: A chunk up to this size is copied if its memory may change. For a longer one the writer waits until the kernel has
#: it.
COPY_BYTES = 1 << 16
#: A message up to this size is sent in one write.
SMALL_MESSAGE_BYTES = 1 << 16


class Kind(IntEnum):
    """What a frame is. The head of a rejection is its reason."""

    REQUEST = 0
    OK = 1
    REJECTED = 2
    FAILED = 3


_KINDS = tuple(Kind)


class NotOurFrame(OverlayError):
    """The peer sent something else; the text is the reason."""


class HeadTooLong(OverlayError):
    """The head of this frame is not read."""

    def __init__(self, head_bytes: int) -> None:
        super().__init__(f"announced a head of {head_bytes} bytes; at most {MAX_HEAD_BYTES} are read")


class Frame(NamedTuple):
    """The beginning of a message. `body_bytes` is None for a body in chunks."""

    kind: Kind
    is_last: bool
    name: str
    head_bytes: int
    body_bytes: int | None


def beginning(kind: Kind, head: bytes, body_bytes: int | None, *, name: bytes = b"", is_last: bool = False) -> bytes:
    """All of a message but its body."""
    size = IN_CHUNKS if body_bytes is None else body_bytes
    return HEADER.pack(MAGIC, kind, is_last, len(name), len(head), size) + name + head


def small_message(kind: Kind, head: bytes, body: Body, *, name: bytes = b"", is_last: bool = False) -> bytes | None:
    """The whole message as one buffer, if it is small and the body is a list; else None."""
    if not isinstance(body, list | tuple):
        return None
    size_bytes = sum(map(len, body))
    if len(head) + size_bytes > SMALL_MESSAGE_BYTES:
        return None
    header = HEADER.pack(MAGIC, kind, is_last, len(name), len(head), size_bytes)
    message = b"".join((header, name, head, *body))
    # A view may count larger items.
    return message if len(message) == HEADER.size + len(name) + len(head) + size_bytes else None


async def read_frame(connection: Connection, idle_timeout_s: float | None = None) -> Frame | None:
    """The beginning of the next message up to its name; None if the peer has closed the connection.

    `idle_timeout_s` bounds the time in which nothing of what this side has sent is acknowledged. Raises `TimeoutError`,
    `NotOurFrame`, `ConnectionClosed`.
    """
    if connection.unread < HEADER.size:
        await connection.gather(HEADER.size, idle_timeout_s, is_prompt=True)
    buffered = connection.buffered
    if len(buffered) < HEADER.size:
        if not buffered:
            connection.raise_error()
            return None
        if not MAGIC.startswith(buffered[: len(MAGIC)]):
            raise NotOurFrame("it does not begin as a message of a p2pnode")
        raise ConnectionClosed("the other side closed it")
    magic, kind, is_last, name_bytes, head_bytes, size = HEADER.unpack_from(buffered)
    if magic != MAGIC:
        raise NotOurFrame("it does not begin as a message of a p2pnode")
    if kind >= len(_KINDS):
        raise NotOurFrame(f"a message of kind {kind}")
    end = HEADER.size + name_bytes
    if len(buffered) < end:
        await connection.gather(end, idle_timeout_s, is_prompt=True)
    name = connection.take(end)[HEADER.size :].decode("utf-8", "replace")
    return Frame(_KINDS[kind], is_last, name, head_bytes, None if size == IN_CHUNKS else size)


async def read_message(
    connection: Connection, frame: Frame, idle_timeout_s: float | None = None
) -> tuple[bytes, BodyReader | WholeBody]:
    """Head and body of a message; a small one is waited for as a whole, which costs a fraction of reading its parts.

    Raises `TimeoutError`, `ConnectionClosed`, and `HeadTooLong` before a head of more than `MAX_HEAD_BYTES` is read.
    """
    head_bytes, body_bytes = frame.head_bytes, frame.body_bytes
    if head_bytes > MAX_HEAD_BYTES:
        raise HeadTooLong(head_bytes)
    if body_bytes is not None and head_bytes + body_bytes <= GATHERED_BYTES:
        size = head_bytes + body_bytes
        if connection.unread < size:
            await connection.gather(size, idle_timeout_s)
        if connection.unread >= size:
            whole = connection.take(size)
            return whole[:head_bytes], WholeBody(whole[head_bytes:])
    # Memory grows with the bytes that arrive, not with the announced length.
    head = bytearray()
    while len(head) < head_bytes:
        piece = bytearray(min(head_bytes - len(head), READ_BYTES))
        await connection.fill(memoryview(piece), idle_timeout_s)
        head += piece
    return bytes(head), BodyReader(connection, body_bytes, idle_timeout_s)


def _unchanged(error: Exception) -> Exception:
    return error


class BodyReader:
    """Reads a body as it arrives, as an asynchronous iterator or with `read_into`."""

    def __init__(
        self,
        connection: Connection,
        size_bytes: int | None,
        idle_timeout_s: float | None,
    ) -> None:
        self._connection = connection
        self._idle_timeout_s = idle_timeout_s
        #: Turns what the stream raises into the error for the reader of the body.
        self.map_error: Callable[[Exception], Exception] = _unchanged
        self._is_chunked = size_bytes is None
        self._left = size_bytes or 0
        self._received_before = connection.received - connection.unread
        self.is_at_end = size_bytes == 0
        self.broken = False

    @property
    def received_bytes(self) -> int:
        """Bytes that have arrived, also inside a read; with those of the framing."""
        return self._connection.received - self._received_before

    async def read(self) -> bytes:
        """The next bytes, at least one; empty at the end. Raises `TimeoutError`, `ConnectionClosed`."""
        if not await self._more():
            return b""
        data = await self._connection.read(min(self._left, READ_BYTES), self._idle_timeout_s)
        if not data:
            raise ConnectionClosed("the other side closed it")
        self._consume(len(data))
        return data

    async def fill(self, target: memoryview) -> int:
        """Fill the target; returns the number of bytes, fewer only at the end. Raises as `read` does."""
        filled = 0
        while filled < len(target) and await self._more():
            piece = target[filled : filled + self._left]
            await self._connection.fill(piece, self._idle_timeout_s)
            filled += len(piece)
            self._consume(len(piece))
        return filled

    async def _more(self) -> bool:
        """Whether more bytes follow; reads the length of the next chunk if needed."""
        if not self.is_at_end and not self._left:
            length = bytearray(CHUNK_LENGTH.size)
            await self._connection.fill(memoryview(length), self._idle_timeout_s)
            (self._left,) = CHUNK_LENGTH.unpack(length)
            self.is_at_end = not self._left
        return not self.is_at_end

    def _consume(self, count: int) -> None:
        self._left -= count
        if not self._left and not self._is_chunked:
            self.is_at_end = True

    def __aiter__(self) -> BodyReader:
        return self

    async def __anext__(self) -> Buffer:
        try:
            data = await self.read()
        except Exception as error:
            self.broken = True
            raise self.map_error(error) from error
        if not data:
            raise StopAsyncIteration
        return data

    async def read_into(self, target: memoryview) -> int:
        """See `overlay.transport.DirectBody`."""
        try:
            return await self.fill(target)
        except Exception as error:
            self.broken = True
            raise self.map_error(error) from error


class WholeBody:
    """A body that has arrived with its head; read as `BodyReader` is."""

    __slots__ = ("_left", "received_bytes")
    #: Nothing of it is left on the stream.
    is_at_end = True

    def __init__(self, data: bytes) -> None:
        self._left = memoryview(data)
        #: As in `BodyReader`.
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


def known_size(body: Body) -> int | None:
    """The size of a body that is a list or has a `size_bytes`; None for one that is produced while it is sent."""
    if isinstance(body, SizedBody):
        return body.size_bytes
    return sum(memoryview(chunk).nbytes for chunk in body) if isinstance(body, list | tuple) else None


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
        #: Whether it gives way to everything else.
        self.is_background = isinstance(body, Background)
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
    start: bytes,
    body: BodyWriter,
    *,
    in_chunks: bool,
    idle_timeout_s: float | None = None,
    pauses_timeouts: bool = False,
) -> None:
    """Write `start`, then the body slice by slice, in chunks if `in_chunks`, and at its own pace in the background.

    `idle_timeout_s` bounds the silence of each write. With `pauses_timeouts` no wait on this connection times out while
    the body produces its next chunk. Raises `BodyFailed` and what `Connection.drain` raises.
    """
    pace = BackgroundPace(connection.sent) if body.is_background else connection.sent
    #: Small pieces are collected, so that each system call writes many bytes.
    pieces: list[Buffer] = []
    size = 0

    async def flush() -> None:
        nonlocal size
        connection.write(pieces)
        pieces.clear()
        size = 0
        await connection.drain(idle_timeout_s)
        if isinstance(pace, BackgroundPace):
            await pace.acknowledged()
        # A write to a fast peer does not yield: without this, a large body would block the loop.
        await asyncio.sleep(0)

    pieces.append(start)
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
            pieces.append(CHUNK_LENGTH.pack(len(view)))
        is_borrowed = len(view) > COPY_BYTES
        while len(view):
            piece, view = view[: pace.slice_bytes], view[pace.slice_bytes :]
            pieces.append(piece)
            size += len(piece)
            if size >= min(COPY_BYTES, pace.slice_bytes) or is_borrowed:
                await flush()
    if in_chunks:
        pieces.append(CHUNK_LENGTH.pack(0))
    if pieces:
        await flush()
