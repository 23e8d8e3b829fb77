"""The pace of a body that gives way."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest

from p2pnode.overlay.sockets.send_queue import LEAST_SLICE_BYTES, QUEUE_S, SLICE_BYTES, BackgroundPace, SendQueue


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
