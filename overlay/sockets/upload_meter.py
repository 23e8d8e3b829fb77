"""Adds up what all connections of a node have sent, and how much of it was acknowledged: the measure of its line.

A reading costs two system calls for each connection that has sent something since everything it had sent was
acknowledged, and none for the others.
"""

from __future__ import annotations

from collections import Counter

from p2pnode.overlay.sockets.connection import Connection
from p2pnode.overlay.transport import MUCH_QUEUED_BYTES, SOME_QUEUED_BYTES, Upload

#: Nothing was read of a connection yet: no number of written bytes.
_UNREAD = (-1, 0)


class UploadMeter:
    """The open connections, and the acknowledged bytes of those that have ended."""

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


def _host(connection: Connection) -> str:
    peer = connection.transport.get_extra_info("peername")
    return peer[0] if peer else ""
