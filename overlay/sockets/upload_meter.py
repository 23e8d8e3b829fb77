"""Adds up what all connections of a node have sent, and how much of it was acknowledged: the measure of its line."""

from __future__ import annotations

from overlay.sockets.connection import Connection
from overlay.transport import Upload


class UploadMeter:
    """The open connections, and the acknowledged bytes of those that have ended."""

    def __init__(self) -> None:
        self._open: dict[Connection, None] = {}
        self._ended_bytes = 0

    def opened(self, connection: Connection) -> None:
        """Count this connection."""
        self._open[connection] = None

    def closed(self, connection: Connection) -> None:
        """The connection has ended; what it has sent still counts."""
        if connection in self._open:
            del self._open[connection]
            self._ended_bytes += connection.sent.acknowledged()

    def read(self) -> Upload:
        """Bytes acknowledged since the start, and bytes queued now."""
        acknowledged_bytes, queued_bytes = self._ended_bytes, 0
        for connection in self._open:
            acknowledged_bytes += connection.sent.acknowledged()
            queued_bytes += connection.sent.queued()
        return Upload(acknowledged_bytes, queued_bytes)
