"""How fast this node's line is: the largest rate at which bytes were delivered lately, in each direction.

The estimator is the windowed maximum of delivery rates of BBR (Cardwell et al., *ACM Queue* 14(5), 2016). What a window
of time delivered is about a lower bound of the line's rate: a slow peer, an idle moment or a busy processor make it
smaller, and only jitter makes it larger. Only bytes that the peer's kernel has acknowledged count, so a burst into this
machine's own buffers does not. The transport reports windows of about a quarter of a second, whatever the number of
bytes.

Windows are collected in rounds. A round ends after ten seconds of sending, or when the line has been idle for a second.
Of a round the second largest rate counts, because one window may be an outlier, and for a line that was full in all
windows the upper quartile, which jitter changes little. Of the last five rounds the largest counts. So a line that got
slower is known after five rounds, a faster one at once. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

from p2pnode.overlay.line.capacity import UNKNOWN, CapacityClass, class_of

#: Time between two readings of the counters of the open connections.
WINDOW_S = 0.25
#: A round has at least so many windows; it ends after this much sending, or after this much idle time.
MIN_WINDOWS = 3
ROUND_S = 10.0
IDLE_S = 1.0
#: Where less waited the last windows together show a rate, if they moved so many bytes: acknowledgements come in
#: bunches while the download is full, and one window had four times what the line carries.
TOGETHER, MIN_BYTES = 4, 1 << 16
#: Rounds that count.
ROUNDS = 5
#: Of windows in which the line was full, so many show its rate, by this quantile.
MIN_FULL_WINDOWS, FULL_QUANTILE = 6, 0.75
#: They show it if they reach this part of the largest rate of all windows.
FULL = 0.5


class LineRate:
    """The rate of one direction, in bytes per second. `quantile`: which rate of a round counts; None: the second
    largest."""

    def __init__(self, min_windows: int = MIN_WINDOWS, quantile: float | None = None) -> None:
        self._ended: list[float] = []
        self._min_windows = min_windows
        self._quantile = quantile
        self._busy_s = self._idle_s = 0.0
        #: The rates of the windows of this round.
        self._rates: list[float] = []
        #: Seconds and bytes of the last windows.
        self._last: deque[tuple[float, int]] = deque(maxlen=TOGETHER)

    @property
    def bytes_per_s(self) -> float | None:
        """The measured rate; None until a round has enough windows."""
        rates = [*self._ended, self._of_round()] if len(self._rates) >= self._min_windows else self._ended
        return max(rates, default=None)

    def _of_round(self) -> float:
        ordered = sorted(self._rates)
        return ordered[-2] if self._quantile is None else ordered[int(self._quantile * (len(ordered) - 1))]

    def window(self, seconds: float, moved_bytes: int, *, is_busy: bool) -> bool:
        """A window has passed in which `moved_bytes` were delivered; returns whether it ended a round.

        `is_busy`: enough waited to be sent at its beginning and at its end. Another window counts only if the last ones
        together moved some bytes, faster than is known. One in which nothing arrived shows a line that is broken, not
        its rate.
        """
        if seconds <= 0.0:
            return False
        self._last.append((seconds, moved_bytes))
        together_bytes = sum(moved for _, moved in self._last)
        if is_busy:
            rate, counts = moved_bytes / seconds, moved_bytes > 0
        else:
            rate = together_bytes / sum(passed_s for passed_s, _ in self._last)
            counts = moved_bytes > 0 and together_bytes >= MIN_BYTES and rate > (self.bytes_per_s or 0.0)
        if not counts:
            self._idle_s += seconds
            return self._idle_s >= IDLE_S and self._end_round()
        self._idle_s = 0.0
        self._busy_s += seconds
        self._rates.append(rate)
        return self._busy_s >= ROUND_S and self._end_round()

    def _end_round(self) -> bool:
        """A round of too few windows continues after the pause."""
        if len(self._rates) < self._min_windows:
            return False
        self._ended = [*self._ended[-(ROUNDS - 1) :], self._of_round()]
        self._busy_s, self._rates = 0.0, []
        return True


#: A line keeps up that is not behind in the windows after so many bytes.
TRIAL_BYTES = 1 << 18

#: Where the announced capacity is from; empty: none is known.
CapacitySource = Literal["", "stored", "transfers"]


class MeasuredLine:
    """The line of a node: both rates, and the capacity class that the node announces.

    `upload` is a lower bound: all that is known of a line that is never full, or waits for one slow peer alone.
    """

    def __init__(self) -> None:
        self.upload = LineRate()
        self.download = LineRate()
        self._full = LineRate(MIN_FULL_WINDOWS, FULL_QUANTILE)
        self._capacity = CapacityClass()
        #: Of the first estimate, until what was sent shows another class.
        self._first: tuple[int, CapacitySource] = (UNKNOWN, "")
        #: Of a trial: the bytes since it began, None where there is none; and the windows since these were enough.
        self._tried_bytes: int | None = None
        self._behind = LineRate()
        self._was_behind = False
        self._windows_after = 0
        self._callbacks: list[Callable[[], None]] = []

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` synchronously after every change of the capacity."""
        self._callbacks.append(callback)

    def begin(self, announced: int, source: CapacitySource) -> bool:
        """Announce this capacity until what is sent shows another; returns False where one is known already, or it is
        none."""
        has_begun = self._capacity.begin(announced)
        if has_begun:
            self._first = announced, source
            self._notify()
        return has_begun

    def begin_trial(self) -> bool:
        """See whether the line keeps up with what is sent from now on; False where its capacity is known."""
        if self.capacity == UNKNOWN:
            self._tried_bytes, self._windows_after, self._was_behind = 0, 0, False
        return self.is_on_trial

    def end_trial(self) -> None:
        """What is sent from now on shows a rate only where the line is full, or bytes enough move."""
        self._tried_bytes = None

    @property
    def is_on_trial(self) -> bool:
        """Whether what was sent has shown neither a rate nor that nothing waits."""
        return self._tried_bytes is not None

    def _notify(self) -> None:
        for callback in self._callbacks:
            callback()

    @property
    def capacity_source(self) -> CapacitySource:
        """Where the announced capacity is from. One of its transfers that equals the first estimate counts as that."""
        announced, source = self._first
        if self.capacity == UNKNOWN:
            return ""
        return source if source and self.capacity == announced else "transfers"

    @property
    def capacity(self) -> int:
        """The announced capacity of the upload (`overlay.line.capacity`)."""
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
        rate, bound, before = self.upload_bytes_per_s, self.upload.bytes_per_s, self.capacity
        # Where little is sent a line is seldom full for long. What it showed then counts in the rounds after it too.
        if rate is not None and (full_ended or ended):
            self._capacity.update(rate, is_exact=True)
        elif bound is not None and ended:
            self._capacity.update(bound, is_exact=False)
        if self.capacity != before:
            self._notify()

    def tried(self, seconds: float, moved_bytes: int, *, is_behind: bool, has_several: bool) -> None:
        """A window of the upload for a trial. `is_behind`: no more was delivered than had waited at its beginning, for
        two peers or more if `has_several`. Such a line shows its rate, the first of which needs no confirmation. For
        one peer that peer may be what is slow; then the trial goes on."""
        if self._tried_bytes is None:
            return
        counts = is_behind and has_several
        self._behind.window(seconds, moved_bytes if counts else 0, is_busy=counts)
        self._tried_bytes += moved_bytes
        self._was_behind = self._was_behind or is_behind
        self._windows_after += self._tried_bytes >= TRIAL_BYTES
        rate = self.upload_bytes_per_s or self._behind.bytes_per_s
        if rate is not None:
            self.begin(class_of(rate), "transfers")
        keeps_up = self._windows_after > MIN_WINDOWS and not self._was_behind
        if self.capacity != UNKNOWN or keeps_up:
            self._tried_bytes = None

    def received(self, seconds: float, moved_bytes: int, *, is_busy: bool) -> None:
        """A window of the download; see `LineRate.window`."""
        self.download.window(seconds, moved_bytes, is_busy=is_busy)
