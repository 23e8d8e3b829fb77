"""Decides when a connection has been silent for too long.

A connection is silent while no byte of the peer arrives and the peer's kernel acknowledges none of this side's. What a
slow line still carries is therefore no silence, however long it takes. A peer whose process hangs fills its receive
window, and then acknowledges nothing. The bytes are looked at several times per timeout; movement counts from the look
before it, so that a dead peer is found no later than `timeout_s` after its last byte. Pure.
"""

from __future__ import annotations

#: Looks per timeout. A line that pauses is given up at the earliest after (1 - 1/LOOKS) of the timeout.
LOOKS = 8


class Silence:
    """Bounds the silence of one wait. `moved_bytes` everywhere: bytes received and bytes acknowledged so far."""

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
        """Seconds until the next look; 0 when the connection has been silent for too long.

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
