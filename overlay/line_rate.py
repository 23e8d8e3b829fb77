"""How fast this node's line is: the largest rate at which bytes were delivered lately, in each direction.

The estimator is the windowed maximum of delivery rates of BBR (Cardwell et al., *ACM Queue* 14(5), 2016). What a window
of time delivered is a lower bound of the line's rate: a slow peer, an idle moment or a busy processor make it smaller,
nothing makes it larger. Only bytes that the peer's kernel has acknowledged count, so a burst into this machine's own
buffers does not. The transport reports windows of about a quarter of a second, whatever the number of bytes.

Windows are collected in rounds. A round ends after ten seconds of sending, or when the line has been idle for a second.
Of a round the second largest rate counts, because one window may be an outlier; of the last five rounds the largest.
So a line that got slower is known after five rounds, a faster one at once. Pure.
"""

from __future__ import annotations

from collections import deque

from overlay.capacity import CapacityClass

#: Time between two readings of the counters of the open connections.
WINDOW_S = 0.25
#: A round has at least so many windows; it ends after this much sending, or after this much idle time.
MIN_WINDOWS = 3
ROUND_S = 10.0
IDLE_S = 1.0
#: A window in which less waited counts if it moved so many bytes.
MIN_BYTES = 1 << 16
#: Rounds that count.
ROUNDS = 5
#: Windows with a full line show its rate if they reach this part of the largest rate of all windows.
FULL = 0.8


class LineRate:
    """The rate of one direction, in bytes per second."""

    def __init__(self) -> None:
        self._ended: deque[float] = deque(maxlen=ROUNDS)
        self._windows = 0
        self._busy_s = self._idle_s = 0.0
        self._largest = self._second = 0.0

    @property
    def bytes_per_s(self) -> float | None:
        """The measured rate; None until a round has enough windows."""
        rates = [*self._ended, self._second] if self._windows >= MIN_WINDOWS else self._ended
        return max(rates, default=None)

    def window(self, seconds: float, moved_bytes: int, *, is_busy: bool) -> bool:
        """A window has passed in which `moved_bytes` were delivered; returns whether it ended a round.

        `is_busy`: enough waited to be sent at its beginning and at its end. Another window counts only if it moved some
        bytes, faster than is known. One in which nothing arrived shows a line that is broken, not its rate.
        """
        if seconds <= 0.0:
            return False
        rate = moved_bytes / seconds
        known = self.bytes_per_s
        counts = moved_bytes > 0 if is_busy else moved_bytes >= MIN_BYTES and rate > (known or 0.0)
        if not counts:
            self._idle_s += seconds
            return self._idle_s >= IDLE_S and self._end_round()
        self._idle_s = 0.0
        self._windows += 1
        self._busy_s += seconds
        if rate > self._largest:
            self._largest, self._second = rate, self._largest
        else:
            self._second = max(self._second, rate)
        return self._busy_s >= ROUND_S and self._end_round()

    def _end_round(self) -> bool:
        """A round of too few windows continues after the pause."""
        if self._windows < MIN_WINDOWS:
            return False
        self._ended.append(self._second)
        self._windows, self._busy_s, self._largest, self._second = 0, 0.0, 0.0, 0.0
        return True


class MeasuredLine:
    """The line of a node: both rates, and the capacity class that the node announces.

    `upload` is a lower bound: all that is known of a line that is never full, or waits for one slow peer alone.
    """

    def __init__(self) -> None:
        self.upload = LineRate()
        self.download = LineRate()
        self._full = LineRate()
        self._capacity = CapacityClass()

    @property
    def capacity(self) -> int:
        """The announced capacity of the upload (`overlay.capacity`)."""
        return self._capacity.announced

    @property
    def upload_bytes_per_s(self) -> float | None:
        """The rate of the upload, if it was full for long enough: with several peers to send to, and not much slower
        than it is known to be."""
        full = self._full.bytes_per_s
        return full if full is not None and full >= FULL * (self.upload.bytes_per_s or 0.0) else None

    def sent(self, seconds: float, moved_bytes: int, *, is_busy: bool, is_full: bool) -> None:
        """A window of the upload; see `LineRate.window`. `is_full`: much waited for two peers or more."""
        full_ended = self._full.window(seconds, moved_bytes if is_full else 0, is_busy=is_full)
        ended = self.upload.window(seconds, moved_bytes, is_busy=is_busy)
        rate, bound = self.upload_bytes_per_s, self.upload.bytes_per_s
        if rate is not None and full_ended:
            self._capacity.update(rate, is_exact=True)
        elif bound is not None and ended:
            self._capacity.update(bound, is_exact=False)

    def received(self, seconds: float, moved_bytes: int, *, is_busy: bool) -> None:
        """A window of the download; see `LineRate.window`."""
        self.download.window(seconds, moved_bytes, is_busy=is_busy)
