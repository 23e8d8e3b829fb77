"""The delay of the event loop: quantiles over measurements with a late clock."""

from __future__ import annotations

import asyncio
import itertools

from p2pnode.status.loop_delay import LoopDelay
from tests.harness.environment.virtual_loop import run


class LateClock:
    """Every second reading is 100 ms and a given delay after the reading before."""

    def __init__(self, delays_s: list[float]) -> None:
        self._delays_s = itertools.cycle(delays_s)
        self._now = 0.0
        self._due = False

    def monotonic(self) -> float:
        if self._due:
            self._now += 0.1 + next(self._delays_s)
        self._due = not self._due
        return self._now

    def wall(self) -> float:
        return self._now


def test_the_report_has_median_and_maximum_in_milliseconds() -> None:
    """Before the first measurement there is no figure; then the quantiles follow the delays."""

    async def main() -> None:
        delay = LoopDelay(LateClock([0.0, 0.0, 0.0, 0.25]))
        assert delay.report().delay_ms_p50 is None
        task = asyncio.create_task(delay.run())
        await asyncio.sleep(2.05)
        task.cancel()

        report = delay.report()
        assert (report.delay_ms_p50, report.delay_ms_max) == (0.0, 250.0)
        assert report.tasks == 2

    run(main())
