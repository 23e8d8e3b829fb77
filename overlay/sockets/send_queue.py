"""How many bytes of a connection the peer's kernel has acknowledged, as this node's kernel knows it.

Linux counts acknowledged bytes (`tcpi_bytes_acked`, since 4.1). Elsewhere they are what was written less what is still
queued: SIOCOUTQ, or SO_NWRITE on macOS. Without either, what the kernel has taken counts, and bodies are written in
smaller slices (`SendQueue.slice_bytes`), because then nothing is seen of a slice in the kernel's buffer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

#: Largest piece written at once where acknowledged bytes are counted exactly, and elsewhere.
SLICE_BYTES = 1 << 20
SMALL_SLICE_BYTES = 1 << 16
#: `struct tcp_info` of <linux/tcp.h>: the place of `tcpi_bytes_acked`, which counts the SYN as one byte.
_TCP_INFO_BYTES, _BYTES_ACKED_OFFSET = 256, 120
#: The place of `tcpi_min_rtt`, in microseconds, since Linux 4.6.
_MIN_RTT_OFFSET = 148
#: `SO_NWRITE` of <sys/socket.h> on macOS.
_SO_NWRITE = 0x1024

#: Gives a number of bytes for a socket; raises `OSError` where the kernel does not know it.
Probe = Callable[[Any], int]


def acknowledged_by_count(sock: Any) -> int:
    """Bytes acknowledged since the connection was made, by TCP_INFO of Linux."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _BYTES_ACKED_OFFSET + 8:
        raise OSError("this kernel does not count acknowledged bytes")
    return int(struct.unpack_from("=Q", info, _BYTES_ACKED_OFFSET)[0])


def queued_in_kernel(sock: Any) -> int:
    """Bytes in the send queue: not sent yet, or sent and not acknowledged."""
    if sys.platform == "darwin":
        return int(sock.getsockopt(socket.SOL_SOCKET, _SO_NWRITE))
    import fcntl
    import termios

    return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0])


COUNT: Probe | None = acknowledged_by_count if hasattr(socket, "TCP_INFO") else None
QUEUE: Probe | None = None if sys.platform == "win32" else queued_in_kernel


class SendQueue:
    """The bytes on their way out of one connection."""

    def __init__(self, transport: asyncio.WriteTransport, count: Probe | None = COUNT, queue: Probe | None = QUEUE):
        self._transport = transport
        self._socket = transport.get_extra_info("socket")
        self._count = count if self._socket is not None else None
        self._queue = queue if self._socket is not None else None
        #: Bytes written so far.
        self.written = 0
        self._acknowledged = 0

    @property
    def slice_bytes(self) -> int:
        """Largest piece to be written at once."""
        return SLICE_BYTES if self._count is not None else SMALL_SLICE_BYTES

    def acknowledged(self) -> int:
        """Bytes acknowledged so far; after the end of the connection the last number known. Never falls.

        Over TLS these are encrypted bytes, a little more than were written.
        """
        self._acknowledged = max(self._acknowledged, self._look())
        return self._acknowledged

    def queued(self) -> int:
        """Bytes written and not acknowledged, as far as it is known."""
        if self._transport.is_closing():
            return 0
        waiting = self._transport.get_write_buffer_size()
        if self._queue is not None:
            try:
                return waiting + self._queue(self._socket)
            except OSError:
                self._queue = None
            except ValueError:  # the socket has ended
                return 0
        return max(waiting, self.written - self.acknowledged())

    def least_round_trip_s(self) -> float:
        """The shortest round trip of this connection, as the kernel knows it; infinite where it does not."""
        if self._count is None:
            return math.inf
        with contextlib.suppress(OSError, ValueError):
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            if len(info) >= _MIN_RTT_OFFSET + 4 and (least := struct.unpack_from("=I", info, _MIN_RTT_OFFSET)[0]):
                return float(least) / 1e6
        return math.inf

    def _look(self) -> int:
        if self._count is not None:
            try:
                return self._count(self._socket)
            except (OSError, ValueError):  # uvloop raises a ValueError after the end
                if self._transport.is_closing():
                    return 0
                self._count = None  # an old kernel, or not a TCP socket
        taken = self.written - self._transport.get_write_buffer_size()
        if self._queue is not None:
            try:
                return taken - self._queue(self._socket)
            except (OSError, ValueError):
                if self._transport.is_closing():
                    return 0
                self._queue = None
        return taken


#: A slice of a background body at first, and at least.
LEAST_SLICE_BYTES = 1 << 12
#: A slice may take this much longer than a round trip: its own time on the line, and what queues before it.
QUEUE_S = 0.1
#: How often an unacknowledged slice is looked at.
LOOK_S = 0.01


class BackgroundPace:
    """The pace of a body that gives way (`overlay.transport.Background`), after LEDBAT (RFC 6817): a queue that grows
    means that others want the line. One slice is under way at a time, so it adds `QUEUE_S` to a queue at most; where
    others fill the line it is down to `LEAST_SLICE_BYTES` per round trip."""

    def __init__(self, sent: SendQueue) -> None:
        self._sent = sent
        self._least_s = math.inf
        self.slice_bytes = LEAST_SLICE_BYTES

    async def acknowledged(self) -> None:
        """Wait until everything written is acknowledged, and choose the size of the next slice."""
        now = asyncio.get_running_loop().time
        began_s = now()
        while self._sent.queued():  # noqa: ASYNC110 (the kernel tells nobody)
            await asyncio.sleep(LOOK_S)
        self.took(now() - began_s)

    def took(self, seconds: float) -> None:
        """A slice was acknowledged after so long."""
        self._least_s = min(self._least_s, seconds, self._sent.least_round_trip_s())
        queued_s = seconds - self._least_s
        if queued_s > QUEUE_S:
            self.slice_bytes = max(self.slice_bytes // 2, LEAST_SLICE_BYTES)
        elif queued_s < QUEUE_S / 2:
            self.slice_bytes = min(2 * self.slice_bytes, SLICE_BYTES)
