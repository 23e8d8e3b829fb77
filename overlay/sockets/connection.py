"""One TCP connection, plain or sealed: bytes in, straight to where they are wanted, and bytes out; every wait bounded.

asyncio's own streams and HTTP libraries make bytes of what they read and bytes of those; here the kernel (or TLS)
writes into the memory that the reader names. What nobody waits for is kept up to `ROOM_BYTES`, then the peer must wait:
so a peer that leaves is noticed while nobody reads. One task reads and one writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import cast

from overlay.errors import OverlayError
from overlay.transport import Buffer

#: What is kept of a connection that nobody reads from; about what is copied once more of a large piece.
ROOM_BYTES = 1 << 14
#: A piece from this size on is read straight into its place.
DIRECT_BYTES = 1 << 12

#: Where bytes that nobody waits for arrive. One for all connections: they are taken out before anything else runs.
_LANDING = memoryview(bytearray(ROOM_BYTES))


class ConnectionClosed(OverlayError, ConnectionError):
    """The connection has ended before what was awaited had come or gone."""


class Connection(asyncio.BufferedProtocol):
    """See the module. `begun` and `ended` are called once, when the connection is there and when it is gone."""

    def __init__(
        self,
        begun: Callable[[Connection], None] | None = None,
        ended: Callable[[Connection], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._begun = begun
        self._ended = ended
        self._transport: asyncio.Transport | None = None
        self._have = bytearray()
        self._target: memoryview | None = None
        self._reader: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._writer: asyncio.Future[None] | None = None
        self._is_read = True
        self._is_full = False
        self._at_end = False
        self._error: Exception | None = None
        #: Bytes received so far: whether anything has come at all, and whether something still comes.
        self.received = 0

    # --- what the loop calls --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # Paused until the kernel has all of it: a buffer may be reused after `drain`, and nothing piles up here. Over
        # TLS a limit of 0 would pause a writer that has nothing to wait for, and nothing would wake it again (both
        # loops compare with >=); what is written there is a copy, the ciphertext.
        self.transport.set_write_buffer_limits(high=1 if self.is_sealed else 0)
        if self._begun is not None:
            self._begun(self)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 (the kernel gives what it has)
        return self._target if self._target is not None else _LANDING

    def buffer_updated(self, nbytes: int) -> None:
        self.received += nbytes
        if self._target is not None:
            self._target = self._target[nbytes:]
            if len(self._target):
                return
            self._target = None
        else:
            self._have += _LANDING[:nbytes]
            if len(self._have) >= ROOM_BYTES:
                self._is_read = False
                self.transport.pause_reading()
        _wake(self._reader)

    def eof_received(self) -> None:
        """Nobody speaks and listens half: who has closed has left."""
        self._at_end = True
        _wake(self._reader)

    def connection_lost(self, exc: Exception | None) -> None:
        self._at_end = True
        self._error = exc
        self._is_full = False
        _wake(self._reader)
        _wake(self._writer)
        if self._ended is not None:
            self._ended(self)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        _wake(self._writer)

    # --- what it is ----------------------------------------------------------------------------------------------

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None
        return self._transport

    @property
    def is_sealed(self) -> bool:
        return self.transport.get_extra_info("sslcontext") is not None

    @property
    def is_over(self) -> bool:
        """Nothing more will come, or go."""
        return self._at_end or self._transport is None or self._transport.is_closing()

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits here, who learns that it is over."""
        return self._reader is not None or self._writer is not None

    @property
    def unread(self) -> int:
        """Bytes that have come and that nobody has taken."""
        return len(self._have)

    # --- reading -------------------------------------------------------------------------------------------------

    def take(self, most: int) -> bytes:
        """What is here already, at most so much; perhaps nothing."""
        piece = bytes(self._have[:most])
        del self._have[:most]
        return piece

    async def read(self, most: int, silence_s: float | None = None) -> bytes:
        """What comes next, at least one byte; empty at the end. Raises `TimeoutError`, `ConnectionClosed`."""
        while not self._have:
            if self._at_end:
                self._raise_error()
                return b""
            await self._wait(silence_s)
        return self.take(most)

    async def read_line(self, most: int, end: bytes, silence_s: float | None = None) -> bytes:
        """Up to and with `end`; empty where the other side ended before a byte. Raises `ValueError` for one that is
        longer, `TimeoutError`, `ConnectionClosed`."""
        searched = 0
        while (found := self._have.find(end, max(0, searched - len(end) + 1), most)) < 0:
            searched = len(self._have)
            if searched >= most:
                raise ValueError(f"no end within {most} bytes")
            if self._at_end:
                if not searched:
                    self._raise_error()
                    return b""
                raise self._broken()
            await self._wait(silence_s)
        return self.take(found + len(end))

    async def fill(self, target: memoryview, silence_s: float | None = None) -> None:
        """Fill it whole. `silence_s` bounds the time in which nothing comes. Raises `TimeoutError`,
        `ConnectionClosed`."""
        filled = min(len(self._have), len(target))
        if filled:
            target[:filled] = self._have[:filled]
            del self._have[:filled]
        while filled < len(target):
            if self._at_end:
                raise self._broken()
            rest = target[filled:]
            if len(rest) >= DIRECT_BYTES:
                self._target = rest
                try:
                    await self._wait(silence_s)
                finally:
                    left, self._target = self._target, None
                filled = len(target) - (0 if left is None else len(left))
            else:
                await self._wait(silence_s)
                more = min(len(self._have), len(rest))
                rest[:more] = self._have[:more]
                del self._have[:more]
                filled += more

    async def _wait(self, silence_s: float | None) -> None:
        """Until something has come, all of the target if there is one, or the end."""
        reader = self._reader = self._loop.create_future()
        if silence_s is not None:
            self._timer = self._loop.call_later(silence_s, self._silent, reader, self.received, silence_s)
        if not self._is_read and not self.transport.is_closing():
            self._is_read = True
            self.transport.resume_reading()
        try:
            await reader
        finally:
            self._reader = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _silent(self, reader: asyncio.Future[None], received: int, silence_s: float) -> None:
        if self.received == received:
            if not reader.done():
                reader.set_exception(TimeoutError())
            return
        self._timer = self._loop.call_later(silence_s, self._silent, reader, self.received, silence_s)

    # --- writing -------------------------------------------------------------------------------------------------

    def write(self, pieces: Iterable[Buffer]) -> None:
        """Give these to the kernel, or to TLS; memory that may change is not touched before `drain` has returned."""
        if not self.transport.is_closing():
            self.transport.writelines(pieces)

    async def drain(self, silence_s: float | None = None) -> None:
        """Until all that was written is on its way. Raises `TimeoutError`, `ConnectionClosed`."""
        while self._is_full and not self.transport.is_closing():
            writer = self._writer = self._loop.create_future()
            try:
                if silence_s is None:
                    await writer
                else:
                    async with asyncio.timeout(silence_s):
                        await writer
            finally:
                self._writer = None
        if self._transport is None or self._transport.is_closing():
            raise self._broken()

    # --- ending --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End it when what was written has gone."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End it now."""
        if self._transport is not None:
            self._transport.abort()

    def _broken(self) -> ConnectionClosed:
        broken = ConnectionClosed(str(self._error) if self._error is not None else "the other side closed it")
        broken.__cause__ = self._error
        return broken

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._broken()


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
