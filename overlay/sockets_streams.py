"""How a body travels on an HTTP stream: its framing, its slices, and when a sender's buffer may be reused.

Either way a message is `u32 length (big endian) + head`, then the raw body. Free of aiohttp: it sees a reader with
`readchunk` and a writer with `write` and `drain`. The rules come from measurements (100 MB bodies): no joining reads,
write slices of 1 MiB, and yield after each, because a write to a peer that keeps up does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Generator, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, Protocol

from overlay.transport import MAX_HEAD_BYTES, Body, Buffer, SizedBody

LENGTH_BYTES = 4
#: Largest piece written at once.
SLICE_BYTES = 1 << 20
#: A piece up to this long is copied if its memory may change; a longer one is waited for until the kernel has it.
COPY_BYTES = 1 << 16
#: A message up to this long is sent in one write.
WHOLE_BYTES = 1 << 16


class Reader(Protocol):
    """The reading end of an HTTP body."""

    async def readchunk(self) -> tuple[bytes, bool]: ...


class Writer(Protocol):
    """The writing end of an HTTP body."""

    async def write(self, chunk: Any) -> None: ...

    async def drain(self) -> None: ...


class BadFraming(Exception):
    """The peer's bytes are not a head and a body."""


class Inflow:
    """An incoming message: `head()` first, then an asynchronous iterator of the body's buffers.

    `silence_s` bounds every wait (None: the reader has its own bound); `translate` turns whatever the stream raises
    into the error for the one who reads.
    """

    def __init__(
        self, reader: Reader, translate: Callable[[Exception], Exception], silence_s: float | None = None
    ) -> None:
        self._reader = reader
        self._translate = translate
        self._silence_s = silence_s
        #: How many bytes of head are read without asking, and whom to ask for more; set by the serving end.
        self.small_head_bytes = MAX_HEAD_BYTES
        self.large_head: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
        self._rest: memoryview | None = None
        self.broken = False
        self.ended = False

    async def head(self) -> bytes:
        """The head. Raises `BadFraming` when it is cut short or longer than `MAX_HEAD_BYTES`."""
        data = bytearray()
        while len(data) < LENGTH_BYTES:
            data += await self._more("before its head")
        length = int.from_bytes(data[:LENGTH_BYTES], "big")
        if length > MAX_HEAD_BYTES:
            raise BadFraming(f"announced a head of {length} bytes; at most {MAX_HEAD_BYTES} are read")
        stop = LENGTH_BYTES + length
        if length <= self.small_head_bytes:
            return await self._read_head(data, stop)
        async with self.large_head():
            return await self._read_head(data, stop)

    async def _read_head(self, data: bytearray, stop: int) -> bytes:
        # Grows with what arrives, never with what was announced.
        while len(data) < stop:
            data += await self._more("within its head")
        if len(data) > stop:
            self._rest = memoryview(bytes(data[stop:]))
        return bytes(data[LENGTH_BYTES:stop])

    async def _more(self, where: str) -> bytes:
        data = await self._read()
        if not data:
            raise BadFraming(f"ended {where}")
        return data

    def __aiter__(self) -> Inflow:
        return self

    async def __anext__(self) -> Buffer:
        if self._rest is not None:
            rest, self._rest = self._rest, None
            return rest
        data = await self._read()
        if not data:
            raise StopAsyncIteration
        return data

    async def _read(self) -> bytes:
        if self.ended:
            return b""
        try:
            if self._silence_s is None:
                data = await self._next()
            else:
                async with asyncio.timeout(self._silence_s):
                    data = await self._next()
        except Exception as error:
            self.broken = True
            raise self._translate(error) from error
        if not data:
            self.ended = True
        return data

    async def _next(self) -> bytes:
        # Not `readany`: it joins what has arrived into fresh memory, which doubles the receiver's work when the body
        # is chunked (0.58 against 0.26 CPU seconds per GB).
        data, more = await self._reader.readchunk()
        while more and not data:  # the boundary of an HTTP chunk
            data, more = await self._reader.readchunk()
        return data


def framed(head: bytes) -> bytes:
    """The head with its length before it."""
    return len(head).to_bytes(LENGTH_BYTES, "big") + head


def known_size(body: Body) -> int | None:
    """Bytes of a body that stands already, or says so; None for another that is produced while it is sent."""
    if isinstance(body, SizedBody):
        return body.size_bytes
    return sum(memoryview(chunk).nbytes for chunk in body) if isinstance(body, list | tuple) else None


def whole(head: bytes, body: Body) -> bytes | None:
    """The whole message, where it is small and stands already."""
    size = known_size(body)
    if size is None or size + len(head) > WHOLE_BYTES or not isinstance(body, list | tuple):
        return None
    return b"".join((framed(head), *body))


class BodyFailed(Exception):
    """The sender's own iterator raised `error` while its body was being sent."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"the body could not be produced: {error!r}")
        self.error = error


class Outflow:
    """Either kind of body, asked for one chunk after the other. Not a generator: one that is left in the middle is
    finished by a task of the loop's, at a moment nobody chose."""

    def __init__(self, body: Body) -> None:
        self._async = body.__aiter__() if isinstance(body, AsyncIterable) else None
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


async def pour(
    writer: Writer,
    transport: asyncio.WriteTransport | None,
    head: bytes,
    body: Outflow,
    *,
    silence_s: float | None = None,
    on_asking: Callable[[], None] | None = None,
    on_progress: Callable[[], None] | None = None,
) -> None:
    """Write a message, slice by slice. Raises `BodyFailed`, and whatever the writer raises.

    `silence_s` bounds each write (`TimeoutError`). `on_asking` is called before the body is asked for its next chunk,
    `on_progress` whenever there is something to write again.
    """
    if transport is not None:
        # Paused until the kernel has all of it: a buffer may be reused after `drain`, and nothing piles up here. Over
        # TLS a limit of 0 would pause a writer that has nothing to wait for, and nothing would wake it again (both
        # loops compare with >=); what is written there is a copy, the ciphertext.
        transport.set_write_buffer_limits(high=0 if transport.get_extra_info("sslcontext") is None else 1)
    asking, progress = on_asking or _nothing, on_progress or _nothing
    try:
        await _bounded(writer.write(framed(head)), silence_s)
        while True:
            asking()
            chunk = await body.next()
            progress()
            if chunk is None:
                return
            may_change = not isinstance(chunk, bytes)
            view = memoryview(chunk).cast("B")
            if may_change and len(view) <= COPY_BYTES:
                view, may_change = memoryview(bytes(view)), False
            for start in range(0, len(view), SLICE_BYTES):
                await _bounded(writer.write(view[start : start + SLICE_BYTES]), silence_s)
                if may_change:
                    await _bounded(writer.drain(), silence_s)
                progress()
                # A write does not yield while the peer keeps up: the loop would lag by whole deltas.
                await asyncio.sleep(0)
    finally:
        if transport is not None and not transport.is_closing():
            transport.set_write_buffer_limits()


def _nothing() -> None:
    pass


async def _bounded(awaitable: Awaitable[None], silence_s: float | None) -> None:
    if silence_s is None:
        await awaitable
    else:
        async with asyncio.timeout(silence_s):
            await awaitable
