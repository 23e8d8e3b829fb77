"""The running loss of one trainer, by which leader SGD chooses its leaders. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable


class RecentLosses:
    """The losses of the last batches, as many as `window` says."""

    def __init__(self) -> None:
        self._window = 0
        self._losses: deque[float] = deque()

    def add(self, losses: Iterable[float], window: int) -> None:
        """The losses of a turn; `window` 0: nobody asks for them."""
        if window != self._window:
            self._window, self._losses = window, deque(self._losses, maxlen=window)
        self._losses.extend(losses)

    def mean(self) -> float | None:
        """Their mean; None while there are fewer than the window, so that a trainer with few batches does not look
        best, and where one is not finite."""
        if not self._window or len(self._losses) < self._window:
            return None
        mean = math.fsum(self._losses) / self._window if all(map(math.isfinite, self._losses)) else math.nan
        return mean if math.isfinite(mean) else None
