"""Holds the TCP connections of a closed swarm until their first bytes contain a valid admission ticket.

The gate peeks at the first bytes (MSG_PEEK), so TLS reads the connection from its start. A connection without a valid
ticket is closed without sending a byte. The number of waiting connections and their time are bounded. Tickets are
verified by `overlay.sealing.tickets`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Callable

from p2pnode.overlay.errors import Refused
from p2pnode.overlay.sealing.tickets import MAX_HELLO_BYTES, TicketVerdict
from p2pnode.overlay.sockets.concurrency import ConnectionPlaces
from p2pnode.overlay.sockets.listener import Listener

#: The first bytes of a member arrive one round trip after it has connected.
FIRST_BYTES_TIMEOUT_S = 3.0
#: Waiting connections. Beyond that, the oldest one of the host with the most connections is dropped.
MAX_PENDING = 512
#: An incomplete ClientHello is checked again after this time, then after twice as long each time. While its first bytes
#: stay unread, the rest of it makes no new event.
RECHECK_DELAY_S = 0.03


class _PendingConnection:
    """A connection whose ticket has not been verified."""

    __slots__ = ("recheck_delay_s", "stream", "timer")

    def __init__(self, stream: socket.socket, timer: asyncio.TimerHandle) -> None:
        self.stream = stream
        self.timer = timer
        self.recheck_delay_s = RECHECK_DELAY_S


class TicketGate:
    """Accepts connections on a listening socket. `admit` gets those with a valid ticket, with nothing read."""

    def __init__(
        self,
        listening: socket.socket,
        verify: Callable[[bytes], TicketVerdict],
        admit: Callable[[socket.socket], None],
        counters: Counter[str],
        max_pending: int = MAX_PENDING,
    ) -> None:
        """`max_pending`: connections whose ticket is awaited, at most `MAX_PENDING`."""
        self._places: ConnectionPlaces[int] = ConnectionPlaces(min(max_pending, MAX_PENDING))
        self._verify = verify
        self._admit = admit
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, _PendingConnection] = {}
        self._listener = Listener(listening, self._on_connection)

    def close(self) -> None:
        """Stop listening and close the waiting connections."""
        self._listener.close()
        for pending in list(self._pending.values()):
            self._remove(pending)
            pending.stream.close()

    def _on_connection(self, stream: socket.socket, host: str) -> None:
        self._counters["streams_accepted"] += 1
        timer = self._loop.call_later(FIRST_BYTES_TIMEOUT_S, self._drop, stream.fileno(), "silent")
        pending = _PendingConnection(stream, timer)
        self._pending[stream.fileno()] = pending
        if (crowded := self._places.enter(stream.fileno(), host)) is not None:
            self._drop(crowded, "crowded")
        self._check(stream.fileno())

    def _check(self, fileno: int) -> None:
        pending = self._pending.get(fileno)
        if pending is None:
            return
        self._loop.remove_reader(fileno)
        try:
            data = pending.stream.recv(MAX_HELLO_BYTES, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            self._loop.add_reader(fileno, self._check, fileno)
            return
        except OSError:
            data = b""
        if not data:
            self._drop(fileno, "left")
            return
        try:
            verdict = self._verify(data)
        except Refused as reason:
            self._drop(fileno, str(reason))
            return
        if verdict is TicketVerdict.INCOMPLETE:
            self._loop.call_later(pending.recheck_delay_s, self._recheck, pending)
            pending.recheck_delay_s *= 2
            return
        self._remove(pending)
        self._counters["streams_admitted"] += 1
        self._admit(pending.stream)

    def _recheck(self, pending: _PendingConnection) -> None:
        # Another connection may have its file descriptor by now.
        if self._pending.get(pending.stream.fileno()) is pending:
            self._check(pending.stream.fileno())

    def _drop(self, fileno: int, reason: str) -> None:
        pending = self._pending.get(fileno)
        if pending is None:
            return
        self._counters[f"streams_dropped_{reason}"] += 1
        self._remove(pending)
        with contextlib.suppress(OSError):
            pending.stream.close()

    def _remove(self, pending: _PendingConnection) -> None:
        fileno = pending.stream.fileno()
        pending.timer.cancel()
        self._loop.remove_reader(fileno)
        del self._pending[fileno]
        self._places.leave(fileno)
