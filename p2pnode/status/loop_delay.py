"""Measures how late the event loop is: a timer compares when it should have fired with when it did.

A daemon whose loop is late answers probes late and is suspected of being dead. Training runs in a process of its own
for this reason. `/status` shows the figures of the last minute.
"""

from __future__ import annotations

import asyncio
from collections import deque

from p2pnode.overlay.environment import Clock
from p2pnode.status.schema import LoopStatus

PERIOD_S = 0.1
KEPT = round(60 / PERIOD_S)


class LoopDelay:
    """Measures until cancelled."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._delays_s: deque[float] = deque(maxlen=KEPT)

    async def run(self) -> None:
        while True:
            due = self._clock.monotonic() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self._delays_s.append(max(0.0, self._clock.monotonic() - due))

    def report(self) -> LoopStatus:
        """Median, 99th percentile and maximum in milliseconds, None before the first measurement.

        The number of the loop's tasks is in it too: it must not grow with time.
        """
        ordered = sorted(self._delays_s)

        def at(share: float) -> float | None:
            return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) if ordered else None

        return LoopStatus(
            delay_ms_p50=at(0.5), delay_ms_p99=at(0.99), delay_ms_max=at(1.0), tasks=len(asyncio.all_tasks())
        )
