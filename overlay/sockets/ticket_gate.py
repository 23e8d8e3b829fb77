"""The threshold of a closed swarm's streams: connections wait here until their first bytes show a ticket.

Looks at what has arrived without taking it (MSG_PEEK), so that TLS finds the connection untouched. Whoever shows
nothing, or nothing of ours, is let go without a byte; how many may wait, and how long, is bounded. What a ticket is,
`overlay.sealing.tickets` decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Callable

from overlay.sealing.client_hello import MOST_HELLO_BYTES
from overlay.sealing.refusal import Refused
from overlay.sealing.tickets import Judgement
from overlay.sockets.listener import Listener

#: A member's first bytes come one round trip after it connected.
PATIENCE_S = 3.0
#: Connections that may wait; when there are more, the host with most of them loses its oldest.
MOST_WAITING = 512
#: A ClientHello that came in part is looked at again after this, and then each time after twice as long: the rest makes
#: no new event while nothing is taken.
LOOK_AGAIN_S = 0.03


class _PendingConnection:
    """One connection that has not been admitted."""

    __slots__ = ("host", "pause_s", "stream", "timer")

    def __init__(self, stream: socket.socket, host: str, timer: asyncio.TimerHandle) -> None:
        self.stream = stream
        self.host = host
        self.timer = timer
        self.pause_s = LOOK_AGAIN_S


class TicketGate:
    """Listens in place of the loop's server, on a socket that listens already; `admit` gets the connections that may
    begin, with nothing read from them."""

    def __init__(
        self,
        listening: socket.socket,
        judge: Callable[[bytes], Judgement],
        admit: Callable[[socket.socket], None],
        counters: Counter[str],
    ) -> None:
        self._judge = judge
        self._admit = admit
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, _PendingConnection] = {}
        self._by_host: Counter[str] = Counter()
        self._listener = Listener(listening, self._arrived)

    def close(self) -> None:
        """Stop listening, and let go of those who wait."""
        self._listener.close()
        for visitor in list(self._waiting.values()):
            self._forget(visitor)
            visitor.stream.close()

    def _arrived(self, stream: socket.socket, host: str) -> None:
        self._counters["streams_accepted"] += 1
        timer = self._loop.call_later(PATIENCE_S, self._let_go, stream.fileno(), "silent")
        visitor = _PendingConnection(stream, host, timer)
        self._waiting[stream.fileno()] = visitor
        self._by_host[visitor.host] += 1
        self._look(stream.fileno())
        if len(self._waiting) > MOST_WAITING:
            self._make_room()

    def _make_room(self) -> None:
        crowded = self._by_host.most_common(1)[0][0]
        oldest = next(number for number, visitor in self._waiting.items() if visitor.host == crowded)
        self._let_go(oldest, "crowded")

    def _look(self, number: int) -> None:
        visitor = self._waiting.get(number)
        if visitor is None:
            return
        self._loop.remove_reader(number)
        try:
            beginning = visitor.stream.recv(MOST_HELLO_BYTES, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            self._loop.add_reader(number, self._look, number)
            return
        except OSError:
            beginning = b""
        if not beginning:
            self._let_go(number, "left")
            return
        try:
            judgement = self._judge(beginning)
        except Refused as reason:
            self._let_go(number, str(reason))
            return
        if judgement is Judgement.INCOMPLETE:
            self._loop.call_later(visitor.pause_s, self._look_again, visitor)
            visitor.pause_s *= 2
            return
        self._forget(visitor)
        self._counters["streams_admitted"] += 1
        self._admit(visitor.stream)

    def _look_again(self, visitor: _PendingConnection) -> None:
        # Its number may be another's by now.
        if self._waiting.get(visitor.stream.fileno()) is visitor:
            self._look(visitor.stream.fileno())

    def _let_go(self, number: int, reason: str) -> None:
        visitor = self._waiting.get(number)
        if visitor is None:
            return
        self._counters[f"streams_dropped_{reason}"] += 1
        self._forget(visitor)
        with contextlib.suppress(OSError):
            visitor.stream.close()

    def _forget(self, visitor: _PendingConnection) -> None:
        number = visitor.stream.fileno()
        visitor.timer.cancel()
        self._loop.remove_reader(number)
        del self._waiting[number]
        self._by_host[visitor.host] -= 1
        if not self._by_host[visitor.host]:
            del self._by_host[visitor.host]
