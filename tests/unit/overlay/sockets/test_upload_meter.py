"""What all connections of a node have sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from p2pnode.overlay.sockets.line_meter import UploadMeter
from p2pnode.overlay.transport import MUCH_QUEUED_BYTES, Upload


class Ending:
    """What the meter uses of a connection."""

    def __init__(self, acknowledged: int, queued: int, received: int = 0, host: str = "10.0.0.1") -> None:
        self.looks = 0
        self.received = received
        self.sent = SimpleNamespace(written=acknowledged + queued, acknowledged=self._acknowledged, queued=self._queued)
        self.queued_bytes = queued
        self.transport = SimpleNamespace(get_extra_info={"peername": (host, 1)}.get)

    def _acknowledged(self) -> int:
        self.looks += 1
        return int(self.sent.written) - self.queued_bytes

    def _queued(self) -> int:
        return self.queued_bytes


def connection(acknowledged: int, queued: int, received: int = 0, host: str = "10.0.0.1") -> Any:
    return Ending(acknowledged, queued, received, host)


def test_open_and_ended_connections_are_added_up() -> None:
    """A connection that ends keeps its acknowledged bytes in the sum, once, and has none queued."""
    meter, one, two = UploadMeter(), connection(100, 7, 11), connection(20, 3, 5)
    assert meter.read() == Upload(0, 0)
    meter.opened(one)
    meter.opened(two)
    assert meter.read() == Upload(120, 10, 16)
    meter.closed(one)
    meter.closed(one)
    assert meter.read() == Upload(120, 3, 16)


def test_an_idle_connection_is_not_looked_at_again_before_it_sends() -> None:
    """With nothing queued its last number stands until something is written."""
    meter, one = UploadMeter(), connection(100, 0)
    meter.opened(one)
    for _ in range(3):
        assert meter.read() == Upload(100, 0)
    assert one.looks == 1
    one.sent.written, one.queued_bytes = 150, 20
    assert meter.read() == Upload(130, 20)
    one.queued_bytes = 0
    assert meter.read() == Upload(150, 0)
    assert meter.read() == Upload(150, 0)
    assert one.looks == 3


def test_peers_for_which_much_is_queued_are_counted() -> None:
    """Two of three have at least 64 KiB to take; the streams to one peer add up."""
    meter, half = UploadMeter(), MUCH_QUEUED_BYTES // 2
    for host, queued in (("a", half), ("a", half), ("b", MUCH_QUEUED_BYTES - 1), ("c", 10 * half), ("c", 10 * half)):
        meter.opened(connection(0, queued, host=host))

    assert meter.read().queued_peers == 2
