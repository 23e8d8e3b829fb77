"""How late the event loop is: a timer that measures by how much it was overslept.

A daemon whose loop lags answers probes late and is suspected; training in a process of its own is what keeps it quick.
The figures of the last minute are shown in `/status`.
"""

from __future__ import annotations

import asyncio
from collections import deque

from overlay.environment import Clock

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

    def report(self) -> dict[str, float | None]:
        """Median, 99th percentile and maximum of the last minute, in milliseconds, None before the first; and how many
        tasks the loop has, which must not grow with time."""
        ordered = sorted(self._delays_s)
        tasks = len(asyncio.all_tasks())
        if not ordered:
            return {"delay_ms_p50": None, "delay_ms_p99": None, "delay_ms_max": None, "tasks": tasks}

        def at(share: float) -> float:
            return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)

        return {"delay_ms_p50": at(0.5), "delay_ms_p99": at(0.99), "delay_ms_max": at(1.0), "tasks": tasks}
