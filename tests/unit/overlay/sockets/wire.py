"""The other end of a `Connection`, without a socket."""

from __future__ import annotations

import asyncio

from p2pnode.overlay.sockets.connection import Connection
from p2pnode.overlay.sockets.framing import BodyReader


class Wire(asyncio.Transport):
    """Delivers `data` to a connection in pieces of the given sizes while reading is not paused, then closes."""

    def __init__(self, data: bytes = b"", cuts: list[int] | None = None) -> None:
        super().__init__()
        self.connection = Connection()
        self.reads = True
        self._data = memoryview(data)
        self._cuts = cuts or [1 << 20]
        self._ended = False
        self.connection.connection_made(self)
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        number = 0
        while len(self._data):
            await asyncio.sleep(0)
            if not self.reads:
                continue
            into = self.connection.get_buffer(-1)
            assert len(into)
            size = min(len(into), len(self._data), self._cuts[number % len(self._cuts)])
            into[:size] = self._data[:size]
            self._data = self._data[size:]
            number += 1
            self.connection.buffer_updated(size)
        self.connection.eof_received()
        self._ended = True
        self.connection.connection_lost(None)

    def close_now(self) -> None:
        """Lose the connection."""
        self._ended = True
        self.connection.connection_lost(None)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def abort(self) -> None:
        self.close_now()

    def close(self) -> None:
        self.close_now()

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return self._ended

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert (high, low) == (0, None)


class SocketWire(asyncio.WriteTransport):
    """A transport with a socket, whose buffers the test sets."""

    def __init__(self) -> None:
        super().__init__({"socket": object()})
        self.buffered_bytes = 0
        self.closing = False

    def get_write_buffer_size(self) -> int:
        return self.buffered_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert (high, low) == (0, None)

    def is_closing(self) -> bool:
        return self.closing


async def all_of(body: BodyReader) -> bytes:
    data = b""
    while piece := await body.read():
        data += piece
    return data
