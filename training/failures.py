"""Counts a trainer's failures and says when a further start would end in the same way. Pure.

A failure counts with those of the same cause within a day, whatever was completed between, and with all since the last
completed step. So a script that raises the same exception again and again is given up even if each start trains for an
hour. One that is killed from outside, which is nobody's fault and has no cause, goes on as long as it completes steps.
"""

from __future__ import annotations

from collections import deque

from p2pnode.training.trainer_link.interface import TrainerFailed

#: A cause that lies further back is forgotten: what fails once a day does not keep a run of weeks from its end.
WINDOW_S = 86400.0
#: Failures remembered: with pauses of 30 s between starts a day has fewer.
MAX_KEPT = 4096

#: Most restarts after failures that count together.
MAX_RESTARTS = 4

#: Before a restart.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0


class Failures:
    """Of one trainer. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, str]] = deque(maxlen=MAX_KEPT)
        self._since_step = 0

    def note(self, cause: str, now: float) -> int:
        """One more; returns how many count together with it, itself included. An empty cause equals no other."""
        self._since_step += 1
        while self._kept and now - self._kept[0][0] > WINDOW_S:
            self._kept.popleft()
        if not cause:
            return self._since_step
        self._kept.append((now, cause))
        return max(self._since_step, sum(known == cause for _, known in self._kept))

    def completed_step(self) -> None:
        """The trainer has completed a step."""
        self._since_step = 0

    def are_too_many(self, count: int) -> bool:
        """Whether so many failures end the trainer."""
        return count > MAX_RESTARTS

    def pause_s(self, failure: TrainerFailed, count: int) -> float:
        """How long to wait before the start that follows this failure, the last of so many. Raises `TrainerFailed` if
        that start would fail in the same way."""
        if failure.fatal:
            raise failure
        if self.are_too_many(count):
            reason = f"{failure.reason} (it has failed {count} times)"
            raise TrainerFailed(reason, failure.hint, fatal=True) from failure
        return min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (count - 1))
