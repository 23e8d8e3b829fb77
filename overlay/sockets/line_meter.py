"""Measures the line of this node: reads four times a second how many bytes its streams have delivered and received.

A window counts as busy if `QUEUED_BYTES` were queued at its beginning and at its end: then the line set the pace, not
the sender. It counts as full if data for two peers was queued at both times: then the line was slow, not one peer.
Nothing is done per write.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from p2pnode.overlay.environment import Clock
from p2pnode.overlay.line.rate import WINDOW_S, MeasuredLine
from p2pnode.overlay.sockets.connection import Connection
from p2pnode.overlay.transport import MUCH_QUEUED_BYTES, SOME_QUEUED_BYTES, Upload

#: With fewer bytes queued, less may be on the way than fits: 128 KiB fill 13 Mbit/s over a round trip of 80 ms.
QUEUED_BYTES = 1 << 17

#: Of so much at the beginning of a window a line that keeps up delivers all within it: a window is longer than a round
#: trip.
WAITING_BYTES = 1 << 14

#: A node that has not sent to two peers at once for so long counts as one with a single peer.
SEVERAL_S = 120.0

#: Nothing was read of a connection yet: no number of written bytes.
_UNREAD = (-1, 0)


class UploadMeter:
    """Adds up what all connections have sent, and how much of it was acknowledged.

    A reading costs two system calls for each connection that has sent something since everything it had sent was
    acknowledged, and none for the others.
    """

    def __init__(self) -> None:
        #: Per connection the bytes written, and acknowledged, when its queue was empty.
        self._open: dict[Connection, tuple[int, int]] = {}
        self._ended_bytes = 0
        self._ended_received_bytes = 0

    def opened(self, connection: Connection) -> None:
        """Count this connection."""
        self._open[connection] = _UNREAD

    def closed(self, connection: Connection) -> None:
        """The connection has ended; what it has sent still counts."""
        if connection in self._open:
            del self._open[connection]
            self._ended_bytes += connection.sent.acknowledged()
            self._ended_received_bytes += connection.received

    def read(self) -> Upload:
        """Bytes acknowledged since the start, bytes queued now, and bytes received since the start."""
        acknowledged_bytes, queued_bytes, received_bytes = self._ended_bytes, 0, self._ended_received_bytes
        queued_for: Counter[str] = Counter()
        for connection, last in self._open.items():
            sent = connection.sent
            received_bytes += connection.received
            if sent.written == last[0]:
                acknowledged_bytes += last[1]
                continue
            queued, acknowledged = sent.queued(), sent.acknowledged()
            acknowledged_bytes += acknowledged
            queued_bytes += queued
            if queued:
                queued_for[_host(connection)] += queued
            else:
                self._open[connection] = sent.written, acknowledged
        queued_peers = sum(queued >= MUCH_QUEUED_BYTES for queued in queued_for.values())
        waiting_peers = sum(queued >= SOME_QUEUED_BYTES for queued in queued_for.values())
        return Upload(acknowledged_bytes, queued_bytes, received_bytes, queued_peers, waiting_peers)


class LineMeter:
    """Reads the counters of all streams, and reports windows to `line`."""

    def __init__(self, line: MeasuredLine, clock: Clock, read: Callable[[], Upload]) -> None:
        self.line = line
        self._clock = clock
        self._read = read
        self._timer: asyncio.TimerHandle | None = None
        self._read_at = 0.0
        self._last = Upload(0, 0)
        self._has_received = False
        self._several_at = -SEVERAL_S

    def start(self) -> None:
        """Read until `stop`."""
        self._read_at, self._last = self._clock.monotonic(), self._read()
        self._timer = asyncio.get_running_loop().call_later(WINDOW_S, self._on_timer)

    def stop(self) -> None:
        """Read nothing more; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(WINDOW_S, self._on_timer)
        self.sample()

    def sample(self) -> None:
        """End a window: compare the counters with those of its beginning."""
        now, before, after = self._clock.monotonic(), self._last, self._read()
        seconds, self._read_at, self._last = now - self._read_at, now, after
        sent_bytes = after.acknowledged_bytes - before.acknowledged_bytes
        received_bytes = after.received_bytes - before.received_bytes
        was_queued = min(before.queued_bytes, after.queued_bytes) >= QUEUED_BYTES
        had_received, self._has_received = self._has_received, received_bytes >= QUEUED_BYTES * seconds
        peers = min(before.queued_peers, after.queued_peers)
        if max(before.queued_peers, after.queued_peers) > 1:
            self._several_at = now
        # With several peers, data for one of them may wait for that peer and not for the line.
        is_shared = peers > 1 or (peers == 1 and now - self._several_at > SEVERAL_S)
        is_behind = before.queued_bytes >= max(WAITING_BYTES, sent_bytes)
        self.line.sent(seconds, sent_bytes, is_busy=was_queued, is_full=was_queued and is_shared)
        self.line.tried(
            seconds, sent_bytes, is_behind=is_behind, has_several=min(before.waiting_peers, after.waiting_peers) > 1
        )
        self.line.received(seconds, received_bytes, is_busy=had_received and self._has_received)


def _host(connection: Connection) -> str:
    peer = connection.transport.get_extra_info("peername")
    return peer[0] if peer else ""
