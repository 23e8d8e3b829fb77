"""What all connections of a node have sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from overlay.sockets.upload_meter import UploadMeter
from overlay.transport import Upload


class Ending:
    """What the meter uses of a connection."""

    def __init__(self, acknowledged: int, queued: int) -> None:
        self.sent = SimpleNamespace(acknowledged=lambda: acknowledged, queued=lambda: queued)


def connection(acknowledged: int, queued: int) -> Any:
    return Ending(acknowledged, queued)


def test_open_and_ended_connections_are_added_up() -> None:
    """A connection that ends keeps its acknowledged bytes in the sum, once, and has none queued."""
    meter, one, two = UploadMeter(), connection(100, 7), connection(20, 3)
    assert meter.read() == Upload(0, 0)
    meter.opened(one)
    meter.opened(two)
    assert meter.read() == Upload(120, 10)
    meter.closed(one)
    meter.closed(one)
    assert meter.read() == Upload(120, 3)
