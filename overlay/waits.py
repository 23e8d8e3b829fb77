"""How long to wait for others: an estimator of round trips, this node's own lag, and a limit of silence that knows
progress in bytes.

What a slow line still carries is no silence, however long it takes. So a wait ends when nothing has moved for its
timeout, and not when it has lasted for so long. Pure.
"""

from __future__ import annotations

#: Weights of a new round trip in the running mean and deviation, and the deviations in a timeout (RFC 6298).
MEAN_WEIGHT, DEVIATION_WEIGHT = 1 / 8, 1 / 4
DEVIATIONS = 4.0


def smoothed(mean_s: float | None, deviation_s: float, seconds: float) -> tuple[float, float]:
    """The running mean and deviation of round trips after another one."""
    if mean_s is None:
        return seconds, seconds / 2
    error_s = seconds - mean_s
    return mean_s + MEAN_WEIGHT * error_s, deviation_s + DEVIATION_WEIGHT * (abs(error_s) - deviation_s)


class RoundTrips:
    """Running mean and deviation of the round trips to one receiver, or to many."""

    __slots__ = ("deviation_s", "mean_s")

    def __init__(self) -> None:
        self.mean_s: float | None = None
        self.deviation_s = 0.0

    def observe(self, seconds: float) -> None:
        """Add the round trip of what was answered (Karn's rule: never an ambiguous one)."""
        self.mean_s, self.deviation_s = smoothed(self.mean_s, self.deviation_s, seconds)

    def timeout_s(self, unmeasured_s: float) -> float:
        """How long to wait for an answer; before anything is measured `unmeasured_s`."""
        return unmeasured_s if self.mean_s is None else self.mean_s + DEVIATIONS * self.deviation_s


#: A timer that is later than this shows that this node's loop lags.
LAG_S = 0.1
MAX_SCORE = 7


class LocalHealth:
    """Lifeguard's local health: a node that lags doubts itself before it suspects others.

    A score: 0 is healthy; each sign that this node is slow raises it, each punctual tick lowers it.
    """

    def __init__(self) -> None:
        self.score = 0

    @property
    def stretch(self) -> float:
        """The factor of this node's time-outs."""
        return 1.0 + self.score

    def on_tick(self, lag_s: float) -> bool:
        """A timer fired this late. True: the loop lagged."""
        if lag_s > LAG_S:
            self.worsen()
            return True
        self.score = max(0, self.score - 1)
        return False

    def worsen(self) -> None:
        """A sign that this node is slow: a late timer, or others that suspect it."""
        self.score = min(MAX_SCORE, self.score + 1)


#: Looks per timeout. A line that pauses is given up at the earliest after (1 - 1/LOOKS) of the timeout.
LOOKS = 8


class Silence:
    """Bounds the silence of one wait. `moved_bytes` everywhere: what has moved so far, as a count that grows.

    The bytes are looked at several times per timeout; movement counts from the look before it, so that a dead peer is
    found no later than `timeout_s` after its last byte. A peer whose process hangs fills its receive window, and then
    acknowledges nothing.
    """

    __slots__ = ("_moved_bytes", "interval_s", "looked_s", "moved_s", "timeout_s")

    def __init__(self, timeout_s: float, now_s: float, moved_bytes: int = 0) -> None:
        self.timeout_s = timeout_s
        self.interval_s = timeout_s / LOOKS
        #: The earliest moment of the last movement that was seen; at first the beginning of the wait.
        self.moved_s = now_s
        #: When it was looked at last; at first the beginning of the wait.
        self.looked_s = now_s
        self._moved_bytes = moved_bytes

    def look(self, now_s: float, moved_bytes: int, *, is_own_turn: bool = False) -> float:
        """Seconds until the next look; 0 when it has been silent for too long.

        `is_own_turn`: this side produces what it sends next, so that the peer has nothing to acknowledge.
        """
        if is_own_turn:
            self.moved_s = now_s
        elif moved_bytes > self._moved_bytes:
            self.moved_s = self.looked_s
        self._moved_bytes = max(moved_bytes, self._moved_bytes)
        self.looked_s = now_s
        left_s = self.moved_s + self.timeout_s - now_s
        # Timers fire a little early on some loops: what is left then is not worth another look.
        return min(left_s, self.interval_s) if left_s > self.timeout_s / 1000 else 0.0
