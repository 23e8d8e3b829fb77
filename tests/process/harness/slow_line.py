"""A slow line on the loopback: relays TCP connections to a node at a bounded rate, with small buffers.

The relay takes no more than the line carries, so that the sender's kernel sees acknowledgements at the rate of the
line.
"""

from __future__ import annotations

import asyncio
import socket
import time

from p2pnode.overlay.addresses import Address

LOCAL = "127.0.0.1"
#: Small receive buffers: what a sender's kernel counts as acknowledged is soon past the line.
BUFFER_BYTES = 16 * 1024


class SlowLine:
    """Relays connections to `target`. `rate`: bytes per second, towards the target and back; None: unlimited."""

    def __init__(self, target: Address, *, rate: float | None = None, rate_back: float | None = None) -> None:
        self.target = target
        self.rate = rate
        self.rate_back = rate_back
        #: Bytes carried towards the target, and back.
        self.carried = [0, 0]
        self._open = asyncio.Event()
        self._open.set()
        self._listener: socket.socket | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}

    async def __aenter__(self) -> Address:
        listener = self._listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        listener.bind((LOCAL, 0))
        listener.listen()
        listener.setblocking(False)
        # No task accepts: one that is cancelled with a connection in its hand would drop it open.
        asyncio.get_running_loop().add_reader(listener, self._accept)
        return Address(*listener.getsockname())

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stop(self) -> None:
        """The line carries nothing until `go_on`; its connections stay."""
        self._open.clear()

    def go_on(self) -> None:
        self._open.set()

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            near, _ = self._listener.accept()
        except OSError:  # the client has gone already
            return
        far = socket.socket()
        relay = asyncio.create_task(self._relay(near, far))
        self._tasks[relay] = None
        # Not in the relay: it may be cancelled before it runs, or while it awaits the ends of its ways.
        for one in (near, far):
            relay.add_done_callback(lambda _, ended=one: ended.close())

    async def _relay(self, near: socket.socket, far: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        for one in (near, far):
            one.setblocking(False)
        ways: list[asyncio.Future[None]] = []
        try:
            await loop.sock_connect(far, (self.target.host, self.target.port))
            ways = [asyncio.ensure_future(self._carry(near, far, 0)), asyncio.ensure_future(self._carry(far, near, 1))]
            await asyncio.gather(*ways)
        except OSError:
            pass
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _carry(self, source: socket.socket, target: socket.socket, way: int) -> None:
        loop = asyncio.get_running_loop()
        free_s = 0.0  # when the line has carried what came before
        while data := await loop.sock_recv(source, BUFFER_BYTES // 2):
            await self._open.wait()
            if rate := (self.rate, self.rate_back)[way]:
                # By the clock, because uvloop counts a pause from the begin of its turn: a busy line would be faster.
                free_s = max(free_s, time.monotonic()) + len(data) / rate
                while (left_s := free_s - time.monotonic()) > 0:  # noqa: ASYNC110  until a moment
                    await asyncio.sleep(left_s)
            await loop.sock_sendall(target, data)
            self.carried[way] += len(data)
        target.shutdown(socket.SHUT_WR)
        raise OSError("ended")
