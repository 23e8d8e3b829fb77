"""What a connection has sent, by the kernel that counts it, and the pace of a body that gives way."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest

from p2pnode.overlay.sockets.send_queue import (
    LEAST_SLICE_BYTES,
    QUEUE_S,
    SLICE_BYTES,
    SMALL_SLICE_BYTES,
    BackgroundPace,
    SendQueue,
)
from tests.unit.overlay.sockets.wire import SocketWire


def unknown(_socket: Any) -> int:
    raise OSError("not known here")


def ended(_socket: Any) -> int:
    raise ValueError("negative file descriptor")


def test_a_kernel_that_counts() -> None:
    """Its number is taken as it is, whatever waits in which buffer, and never falls."""
    counts = iter([100, 250, 240])
    wire = SocketWire()
    wire.buffered_bytes = 4000
    queue = SendQueue(wire, lambda _socket: next(counts), unknown)

    assert [queue.acknowledged() for _ in range(3)] == [100, 250, 250]
    assert queue.slice_bytes == SLICE_BYTES


def test_a_kernel_that_shows_its_queue() -> None:
    """Acknowledged is what was written, less what waits in the process and in the kernel."""
    wire, in_kernel = SocketWire(), [600]
    queue = SendQueue(wire, unknown, lambda _socket: in_kernel[0])
    queue.written, wire.buffered_bytes = 1000, 300

    assert (queue.acknowledged(), queue.queued()) == (100, 900)
    # What moves from the process into the kernel is no progress; what leaves the kernel is.
    wire.buffered_bytes, in_kernel[0] = 200, 700
    assert queue.acknowledged() == 100
    in_kernel[0] = 650
    assert queue.acknowledged() == 150
    assert queue.slice_bytes == SMALL_SLICE_BYTES


@pytest.mark.parametrize("probe", [None, unknown])
def test_a_kernel_that_shows_nothing(probe: Any) -> None:
    """What the kernel has taken counts as progress then."""
    wire = SocketWire()
    queue = SendQueue(wire, probe, probe)
    queue.written, wire.buffered_bytes = 1000, 400

    assert (queue.acknowledged(), queue.queued()) == (600, 400)


def test_after_the_end_the_last_number_stays() -> None:
    """The socket is gone, and what it has sent still counts."""
    wire, answers = SocketWire(), [500]
    queue = SendQueue(wire, lambda _socket: answers.pop(), unknown)
    queue.written = 800
    assert queue.acknowledged() == 500

    wire.closing = True
    queue._count = ended
    assert (queue.acknowledged(), queue.queued()) == (500, 0)
    queue._count, queue._queue = None, ended
    assert (queue.acknowledged(), queue.queued()) == (500, 0)


def test_a_socket_that_has_ended_has_nothing_queued() -> None:
    """Also where its transport does not know yet: no reading of the line fails because of it."""
    queue = SendQueue(SocketWire(), None, ended)
    queue.written = 800

    assert queue.queued() == 0


class Line:
    """A line of this rate and round trip, with so many bytes of others before each slice."""

    def __init__(self, bytes_per_s: float, round_trip_s: float, knows_round_trip: bool = True) -> None:
        self.bytes_per_s = bytes_per_s
        self.round_trip_s = round_trip_s
        self.others_bytes = 0
        self._knows = knows_round_trip

    def least_round_trip_s(self) -> float:
        return self.round_trip_s if self._knows else math.inf

    def send(self, slice_bytes: int) -> float:
        """Seconds until a slice is acknowledged."""
        return self.round_trip_s + (slice_bytes + self.others_bytes) / self.bytes_per_s


def paced(line: Line, slices: int = 30) -> tuple[BackgroundPace, float]:
    """The pace after so many slices, and the bytes per second of the last ten."""
    pace, sent, seconds = BackgroundPace(cast("SendQueue", cast("Any", line))), 0, 0.0
    for number in range(slices):
        size = pace.slice_bytes
        took_s = line.send(size)
        pace.took(took_s)
        if number >= slices - 10:
            sent, seconds = sent + size, seconds + took_s
    return pace, sent / seconds


@pytest.mark.parametrize("knows_round_trip", [True, False])
@pytest.mark.parametrize(("mbit", "round_trip_s"), [(1, 0.06), (5, 0.16), (20, 0.06), (20, 0.3)])
def test_on_an_idle_line_a_body_in_the_background_has_a_quarter_of_it_or_more(
    mbit: float, round_trip_s: float, knows_round_trip: bool
) -> None:
    """And adds to the queue no more than it may: a slice takes a round trip and twice that time at most."""
    line = Line(mbit * 125_000, round_trip_s, knows_round_trip)
    pace, rate = paced(line)
    assert rate >= 0.25 * line.bytes_per_s * min(1.0, QUEUE_S / round_trip_s)
    assert line.send(pace.slice_bytes) <= round_trip_s + 2 * QUEUE_S + LEAST_SLICE_BYTES / line.bytes_per_s


def test_it_gives_way_to_others_and_comes_back() -> None:
    """With a second's bytes of others before it a slice is the smallest; afterwards it grows again."""
    line = Line(125_000, 0.06)
    pace, _ = paced(line)
    line.others_bytes = 125_000
    for _ in range(10):
        pace.took(line.send(pace.slice_bytes))
    assert pace.slice_bytes == LEAST_SLICE_BYTES
    line.others_bytes = 0
    for _ in range(5):
        pace.took(line.send(pace.slice_bytes))
    assert pace.slice_bytes >= 2 * LEAST_SLICE_BYTES


def test_a_slice_is_never_larger_than_an_ordinary_one() -> None:
    """On a line that is never slow."""
    pace, _ = paced(Line(1e9, 0.0001))
    assert pace.slice_bytes == SLICE_BYTES
