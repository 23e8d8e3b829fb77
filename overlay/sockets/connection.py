"""One TCP or TLS connection as an asyncio protocol that reads into the caller's memory; every wait is bounded.

asyncio's streams copy what they read into bytes objects. Here the kernel (or TLS) writes into the memory that the
reader names. Bytes that arrive while no read is pending are buffered up to `BUFFER_BYTES`, then reading pauses. So the
end of a connection is noticed even while no read is pending. One task may read and one may write. A wait with a timeout
ends after so long a silence in both directions (`overlay.waits`), not after so long a transfer.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable
from typing import cast

from p2pnode.overlay.addresses import is_loopback
from p2pnode.overlay.errors import OverlayError
from p2pnode.overlay.sockets.send_queue import SendQueue
from p2pnode.overlay.transport import Buffer
from p2pnode.overlay.waits import Silence

#: Bytes buffered while no read is pending. Of a large read, about this much is copied once more.
BUFFER_BYTES = 1 << 14
#: A read of at least this size goes straight into the target.
DIRECT_READ_BYTES = 1 << 12

#: A small message is gathered as a whole, up to this size.
GATHERED_BYTES = 1 << 16
#: Receives bytes that arrive while no read is pending. All connections share it: they are copied out before other code
#: runs.
_GATHERING_BUFFER = memoryview(bytearray(GATHERED_BYTES))
_SHARED_BUFFER = _GATHERING_BUFFER[:BUFFER_BYTES]


#: Linux counts the first packet of a connection as an acknowledged byte.
SYN_BYTES = 1


#: A timer that is due this share of an interval late is not set again.
EARLY = 0.01


class ConnectionClosed(OverlayError, ConnectionError):
    """The connection ended before all bytes were read or written."""


class Connection(asyncio.BufferedProtocol):
    """See the module. `on_open` and `on_close` are called once each."""

    def __init__(
        self,
        on_open: Callable[[Connection], None] | None = None,
        on_close: Callable[[Connection], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_open = on_open
        self._on_close = on_close
        self._transport: asyncio.Transport | None = None
        #: What has arrived and is not read yet. Who takes bytes from its beginning has read them.
        self.buffered = bytearray()
        self._target: memoryview | None = None
        #: So many bytes a reader waits for at once; 0: any.
        self._gathered = 0
        self._reader: asyncio.Future[None] | None = None
        self._reader_watch = _Watch(self)
        self._writer: asyncio.Future[None] | None = None
        self._is_reading = True
        self._is_full = False
        self._at_end = False
        self._error: Exception | None = None
        self._sent: SendQueue | None = None
        #: Whether it is a TLS connection.
        self.is_sealed = False
        #: Bytes received so far.
        self.received = 0
        #: When a wait last noticed that something had moved, in seconds of the loop; 0 if none did.
        self.moved_s = 0.0
        #: Whether this side produces the next bytes of what it sends: the peer cannot acknowledge them yet.
        self.is_producing = False

    # --- called by the loop ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._sent = SendQueue(self._transport)
        self.is_sealed = self._transport.get_extra_info("sslcontext") is not None
        # asyncio's own transport without TLS keeps the memory from Python 3.12 on, and 3.12 and 3.13.0 pause no writer
        # for it: the memory would be used again before it is sent.
        self._writes_lines = type(transport).__module__ != "asyncio.selector_events"
        _keep_queues_short(self._transport)
        # With a limit of 0 a writer waits until the kernel has everything, so a buffer may be reused after `drain`.
        # With TLS a limit of 0 would pause a writer permanently (both loops compare with >=). There 1 is enough,
        # because TLS writes a copy, the ciphertext.
        self.transport.set_write_buffer_limits(high=1 if self.is_sealed else 0)
        if self._on_open is not None:
            self._on_open(self)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 (the kernel fills what it has)
        if self._target is not None:
            return self._target
        return _GATHERING_BUFFER if self._gathered else _SHARED_BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        self.received += nbytes
        if self._target is not None:
            self._target = self._target[nbytes:]
            if len(self._target):
                return
            self._target = None
        else:
            self.buffered += _GATHERING_BUFFER[:nbytes]
            count = len(self.buffered)
            if count < self._gathered:
                return
            if count >= BUFFER_BYTES:
                self._is_reading = False
                self.transport.pause_reading()
        if (reader := self._reader) is not None and not reader.done():
            reader.set_result(None)

    def eof_received(self) -> None:
        """Half-closed connections are not supported: the end of the input is the end."""
        self._at_end = True
        _wake(self._reader)

    def connection_lost(self, exc: Exception | None) -> None:
        self._at_end = True
        self._error = exc
        self._is_full = False
        self._reader_watch.stop()
        _wake(self._reader)
        _wake(self._writer)
        if self._on_close is not None:
            self._on_close(self)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        _wake(self._writer)

    # --- state ----------------------------------------------------------------------------------------------------

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None
        return self._transport

    @property
    def has_ended(self) -> bool:
        """Whether no more bytes will be received or sent."""
        return self._at_end or self._transport is None or self._transport.is_closing()

    @property
    def has_waiter(self) -> bool:
        """Whether a task waits here, which will notice that the connection ended."""
        return self._reader is not None or self._writer is not None

    @property
    def unread(self) -> int:
        """Number of buffered bytes."""
        return len(self.buffered)

    @property
    def sent(self) -> SendQueue:
        """What was written, and how much of it the peer's kernel has acknowledged."""
        assert self._sent is not None
        return self._sent

    def moved_bytes(self) -> int:
        """See `RequestStream`."""
        return 0 if self.has_ended or self._sent is None else self.received + self._sent.acknowledged()

    def settled_bytes(self) -> int:
        """What `moved_bytes` gives where everything written was acknowledged, as after a complete response: without a
        system call. Over TLS more bytes were acknowledged than written, and the kernel is asked."""
        if self.is_sealed or self._sent is None:
            return self.moved_bytes()
        return self.received + self._sent.written + SYN_BYTES

    # --- reading --------------------------------------------------------------------------------------------------

    def peek(self, limit: int) -> bytes:
        """Up to `limit` buffered bytes, which stay."""
        return bytes(self.buffered[:limit])

    def take(self, limit: int) -> bytes:
        """Up to `limit` buffered bytes; may be empty."""
        piece = bytes(self.buffered[:limit])
        del self.buffered[:limit]
        return piece

    async def arrival(self) -> None:
        """Wait for the first byte, or the end."""
        if not self.buffered and not self._at_end:
            await self._wait(None)

    async def gather(self, size_bytes: int, idle_timeout_s: float | None = None, *, is_prompt: bool = False) -> None:
        """Wait until so many bytes are buffered, at most `GATHERED_BYTES`, or for the end. Raises `TimeoutError`.

        `is_prompt`: bytes that arrive do not extend the timeout; acknowledged bytes do.
        """
        if len(self.buffered) >= size_bytes:
            return
        silence = self._silence(idle_timeout_s)
        self._gathered = size_bytes
        try:
            while len(self.buffered) < size_bytes and not self._at_end:
                await self._wait(silence, counts_received=not is_prompt)
        finally:
            self._gathered = 0

    async def read(self, limit: int, idle_timeout_s: float | None = None) -> bytes:
        """The next bytes, at least one; empty at the end. Raises `TimeoutError`, `ConnectionClosed`."""
        while not self.buffered:
            if self._at_end:
                self.raise_error()
                return b""
            await self._wait(self._silence(idle_timeout_s))
        return self.take(limit)

    async def fill(self, target: memoryview, idle_timeout_s: float | None = None) -> None:
        """Fill the whole target; `idle_timeout_s` bounds the time without a byte. Raises `TimeoutError`,
        `ConnectionClosed`."""
        filled = min(len(self.buffered), len(target))
        if filled:
            target[:filled] = self.buffered[:filled]
            del self.buffered[:filled]
        if filled == len(target):
            return
        silence = self._silence(idle_timeout_s)
        while filled < len(target):
            if self._at_end:
                raise self._closed_error()
            rest = target[filled:]
            if len(rest) >= DIRECT_READ_BYTES:
                self._target = rest
                try:
                    await self._wait(silence)
                finally:
                    left, self._target = self._target, None
                filled = len(target) - (0 if left is None else len(left))
            else:
                await self._wait(silence)
                more = min(len(self.buffered), len(rest))
                rest[:more] = self.buffered[:more]
                del self.buffered[:more]
                filled += more

    async def _wait(self, silence: Silence | None, *, counts_received: bool = True) -> None:
        """Wait for bytes (for the whole target, if there is one) or the end."""
        reader = self._reader = self._loop.create_future()
        if silence is not None:
            self._reader_watch.begin(reader, silence, counts_received=counts_received)
        if not self._is_reading and not self.transport.is_closing():
            self._is_reading = True
            self.transport.resume_reading()
        try:
            await reader
        finally:
            self._reader = None
            self._reader_watch.future = None

    def _silence(self, timeout_s: float | None) -> Silence | None:
        return None if timeout_s is None else Silence(timeout_s, self._loop.time())

    # --- writing --------------------------------------------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Hand this to the kernel or to TLS."""
        assert self._transport is not None
        assert self._sent is not None
        if not self._transport.is_closing():
            self._sent.written += len(data)
            self._transport.write(data)

    def write(self, pieces: Iterable[Buffer]) -> None:
        """Hand these to the kernel or to TLS. Do not change their memory before `drain` has returned."""
        assert self._transport is not None
        assert self._sent is not None
        if not self._transport.is_closing():
            listed = list(pieces)
            self._sent.written += sum(map(len, listed))
            if self._writes_lines:
                self._transport.writelines(listed)
                return
            for piece in listed:
                self._transport.write(piece)

    async def drain(self, idle_timeout_s: float | None = None) -> None:
        """Wait until the kernel has everything written; `idle_timeout_s` bounds the time in which the peer acknowledges
        nothing. Raises `TimeoutError`, `ConnectionClosed`."""
        silence = self._silence(idle_timeout_s) if self._is_full else None
        while self._is_full and not self.transport.is_closing():
            writer = self._writer = self._loop.create_future()
            watch = _Watch(self)
            if silence is not None:
                watch.begin(writer, silence, counts_received=True)
            try:
                await writer
            finally:
                self._writer = None
                watch.stop()
        if self._transport is None or self._transport.is_closing():
            raise self._closed_error()

    # --- closing --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close after everything written was sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close now, and drop what was not sent."""
        if self._transport is not None:
            self._transport.abort()

    def _closed_error(self) -> ConnectionClosed:
        broken = ConnectionClosed(str(self._error) if self._error is not None else "the other side closed it")
        broken.__cause__ = self._error
        return broken

    def raise_error(self) -> None:
        """Raise what ended the connection, if it was no ordinary end: `ConnectionClosed`."""
        if self._error is not None:
            raise self._closed_error()


class _Watch:
    """Fails a wait when the connection has been silent for too long.

    The next wait goes on with the timer of the last one. A timer that finds no wait is not set again. So a connection
    on which many requests are answered at once has a timer for all of them.
    """

    __slots__ = ("_connection", "_counts_received", "_due_s", "_silence", "_timer", "future")

    def __init__(self, connection: Connection) -> None:
        self._connection: Connection | None = connection
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._silence = Silence(0.0, 0.0)
        self._counts_received = False
        #: What waits; None: nothing does.
        self.future: asyncio.Future[None] | None = None

    def begin(self, future: asyncio.Future[None], silence: Silence, *, counts_received: bool) -> None:
        """Watch this wait, which has just begun or goes on."""
        self.future, self._silence, self._counts_received = future, silence, counts_received
        if self._timer is None or self._due_s > silence.looked_s + (1 + EARLY) * silence.interval_s:
            self._set(silence.interval_s)

    def _set(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._due_s = loop.time() + seconds
        self._timer = loop.call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._connection is None or self.future is None or self.future.done():
            return
        connection, loop = self._connection, self.future.get_loop()
        moved_bytes = connection.sent.acknowledged() + (connection.received if self._counts_received else 0)
        left_s = self._silence.look(loop.time(), moved_bytes, is_own_turn=connection.is_producing)
        connection.moved_s = self._silence.moved_s
        if left_s:
            self._set(left_s)
        else:
            self.future.set_exception(TimeoutError())

    def stop(self) -> None:
        """Watch nothing any more."""
        self._connection = self.future = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _keep_queues_short(transport: asyncio.Transport) -> None:
    """Ask for BBR where the kernel has it and allows it. A control by losses fills the queue of a home router, which is
    seconds long, before it slows down. Everything else waits in it. On the loopback there is no such queue."""
    sock, peer = transport.get_extra_info("socket"), transport.get_extra_info("peername")
    option = getattr(socket, "TCP_CONGESTION", None)
    if option is None or sock is None or not peer or is_loopback(str(peer[0])):
        return
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, option, b"bbr")


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
