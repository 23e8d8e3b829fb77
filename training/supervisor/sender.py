"""Writes messages to a trainer's socket, in order, without blocking the event loop.

Most messages are short, and the trainer always reads, so they are written at once. Values of an engine may be larger
than the socket's buffer: what it does not take waits in memory, and the script's questions bound how much that is.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket


class SocketSender:
    """The writing side of one non-blocking socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._waiting: list[bytes] = []
        self._writer: asyncio.Task[None] | None = None

    def send(self, data: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Write, now or as soon as the socket takes it. A broken socket is the reader's to notice. Descriptors travel
        with a message of the start, when nothing else is under way."""
        if self._writer is not None:
            self._waiting.append(data)
            return
        try:
            sent = socket.send_fds(self._connection, [data], list(descriptors))
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            return
        if sent < len(data):
            self._waiting.append(data[sent:])
            self._writer = asyncio.create_task(self._write(), name="trainer-link")

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                await loop.sock_sendall(self._connection, self._waiting.pop(0))
        except OSError:
            self._waiting.clear()
        finally:
            self._writer = None

    async def stop(self) -> None:
        """Write no more; idempotent."""
        if (writer := self._writer) is not None:
            writer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writer
