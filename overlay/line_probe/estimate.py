"""What a probe of the upload shows: the rate of a full line, a lower bound of a faster one, or nothing.

A node sends a member some hundred kilobytes, two megabytes over a fast line, and reads how many of them the member's
kernel has acknowledged. No report of the member is needed, so it cannot make a line look faster than it is.

A young connection sends twice as much in each round trip until the line is full. So while it is not full, the second
half of all bytes takes one round trip, or two where the window grows by half. If it takes much longer, the line is
full, and the mean rate of that half is the line's. BBR leaves its start-up the same way, when the rate has ceased
to grow (Cardwell et al., *ACM Queue* 14(5), 2016). If all bytes pass before, that mean is a lower bound. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from overlay.capacity import AT_LEAST, UNKNOWN, class_of, split

#: A probe sends so much at most.
PROBE_BYTES = 1 << 21
#: With fewer bytes acknowledged a probe shows nothing, and is not ended before its time.
MIN_BYTES, MIN_DECIDED_BYTES = 1 << 13, 1 << 17
#: A line is full if the second half of the bytes took so many round trips, and so long: on a line above 40 Mbit/s it
#: may have waited for a processor.
FULL_ROUND_TRIPS, FULL_S = 3.5, 0.2
#: Shorter times are not told apart.
SHORTEST_S = 1e-3
#: Readings of a busy process are late. If they were for more than this part of that time, the line may not be full.
LATE = 0.25
#: A peer that has taken nothing for so long has stopped: its line is not the reason.
STALLED_S = 0.5


class Reading(NamedTuple):
    """How many bytes were acknowledged at a time, in seconds from the beginning; `late_s`: later than it was due."""

    at_s: float
    acknowledged_bytes: int
    late_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A rate of the upload, in bytes per second. `is_exact`: the line was full; otherwise it has at least this rate."""

    bytes_per_s: float
    is_exact: bool


def full_rate(readings: Sequence[Reading], round_trip_s: float) -> Estimate | None:
    """The rate of a line that was full in the second half of the bytes acknowledged so far; None if it was not."""
    last = _last_progress(readings)
    if last is None or last.acknowledged_bytes < MIN_DECIDED_BYTES:
        return None
    half = _second_half(readings, last)
    return Estimate(half.bytes_per_s, True) if half.is_long(round_trip_s) and not half.is_late else None


def estimate(readings: Sequence[Reading], round_trip_s: float) -> Estimate | None:
    """What a whole probe has shown, which has ended or whose time is over; None: nothing.

    `round_trip_s`: of a small request before it. The first of the readings is of the beginning.
    """
    last = _last_progress(readings)
    if last is None or last.acknowledged_bytes < MIN_BYTES:
        return None
    is_whole = last.acknowledged_bytes >= PROBE_BYTES
    if not is_whole and readings[-1].at_s - last.at_s >= STALLED_S:
        return None
    half = _second_half(readings, last)
    if half.is_long(round_trip_s):
        return None if half.is_late else Estimate(half.bytes_per_s, True)
    # Not the rate of a shorter time: jitter, which lets acknowledgements come together, would make it too large.
    return Estimate(half.bytes_per_s, False) if is_whole else None


def better(one: Estimate | None, other: Estimate | None) -> Estimate | None:
    """Of the estimates by two receivers the larger one: the smaller shows the line of its receiver."""
    found = [each for each in (one, other) if each is not None]
    return max(found, key=lambda each: (each.bytes_per_s, not each.is_exact), default=None)


def announced(found: Estimate | None, others: Collection[int]) -> int:
    """The capacity class that follows, given those of the other members.

    A lower bound below the median of the others would make this node count as slower than it may be; it says nothing
    then, and counts as the median.
    """
    if found is None:
        return UNKNOWN
    value = class_of(found.bytes_per_s)
    if found.is_exact:
        return value
    known = sorted(each for each, _ in map(split, others) if each != UNKNOWN)
    return UNKNOWN if known and value < known[len(known) // 2] else value + AT_LEAST


def _last_progress(readings: Sequence[Reading]) -> Reading | None:
    """The first reading of as many bytes as the last one has; None if nothing was acknowledged."""
    if not readings or not readings[-1].acknowledged_bytes:
        return None
    final = readings[-1].acknowledged_bytes
    return next(reading for reading in readings if reading.acknowledged_bytes >= final)


class _Half(NamedTuple):
    """The second half of the bytes that were acknowledged."""

    bytes_per_s: float
    seconds: float
    late_s: float

    def is_long(self, round_trip_s: float) -> bool:
        """Whether it took too long for a line that was not full."""
        return self.seconds >= max(FULL_ROUND_TRIPS * round_trip_s, FULL_S)

    @property
    def is_late(self) -> bool:
        """Whether this process may have been what was slow."""
        return self.late_s > LATE * self.seconds


def _second_half(readings: Sequence[Reading], last: Reading) -> _Half:
    half = last.acknowledged_bytes / 2
    began_bytes = max(each.acknowledged_bytes for each in readings if each.acknowledged_bytes <= half)
    number = next(index for index, each in enumerate(readings) if each.acknowledged_bytes == began_bytes)
    began = readings[number]
    seconds = last.at_s - began.at_s
    late_s = sum(each.late_s for each in readings[number + 1 :] if each.at_s <= last.at_s)
    moved_bytes = last.acknowledged_bytes - began.acknowledged_bytes
    return _Half(moved_bytes / max(seconds, SHORTEST_S), seconds, late_s)
