"""Keeps the run so far for the charts of the dashboard, in one ring that is thinned as it grows.

Rows are what `/status` says at one moment: counters are kept as they are, and whoever draws a rate divides the
difference of two rows by the time between them. So every second row can go, and all rates that are left are right.
Times are monotonic seconds and only rise. Pure.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from p2pnode.status.schema import Status
from p2pnode.training.progress import StepRow

#: When there are so many rows, every second one goes, and every second look makes none: a row a second for 16 minutes,
#: one in two seconds for the next 16, and 85 minutes apart after a month.
ROWS = 960
#: The first metrics that a script evaluates are kept, so many: a chart shows no more, and memory stays fixed.
METRICS = 4
#: The phases of a step. `…_seconds` count what they have taken since the first look.
PHASES = ("train", "push", "wait", "pull")

Row = dict[str, float | None]


class History:
    """Rows of the same columns at rising times, at most `rows`; a value that is missing or not finite is NaN."""

    def __init__(self, rows: int = ROWS) -> None:
        self.times = array("d")
        self.series: dict[str, array[float]] = {}
        self._rows = rows
        self._every = 1
        self._looks = 0
        self._step: int | None = None
        self._spent_s = dict.fromkeys(PHASES, 0.0)
        #: The newest row, whether it is kept or not.
        self._newest: tuple[float, Row] | None = None

    def look(self, now: float, status: Status, steps: Sequence[StepRow]) -> Row:
        """The row of this moment, of which the history keeps each that is due. `steps`: the last ones."""
        self._spend(status.step, steps)
        row = self._row(status)
        if self.times and now <= self.times[-1]:
            return row
        self._newest = now, row
        if self._looks % self._every == 0:
            self._keep(now, row)
        self._looks += 1
        return row

    def kept(self) -> tuple[list[float], dict[str, list[float]]]:
        """Times and series of all rows, and of the newest: what follows a page adds to a row of a second ago."""
        times, series = self.times.tolist(), {name: values.tolist() for name, values in self.series.items()}
        if self._newest is not None and self._newest[0] > times[-1]:
            times.append(self._newest[0])
            for name, values in series.items():
                values.append(_number(self._newest[1].get(name)))
        return times, series

    def _spend(self, step: int, steps: Sequence[StepRow]) -> None:
        """Count the time of the steps that have ended since the last look."""
        for row in steps:
            if self._step is not None and row["step"] > self._step:
                self._spent_s["train"] += row.get("train_seconds", 0.0)
                self._spent_s["push"] += row.get("push_seconds", 0.0)
                self._spent_s["wait"] += row.get("wait_seconds", 0.0)
                self._spent_s["pull"] += row.get("pull_seconds", 0.0)
        self._step = step

    def _row(self, status: Status) -> Row:
        exchange, training, line, population = status.exchange, status.training, status.line, status.population
        metrics = {f"metric:{name}": value for name, value in training.metrics.items() if name != "loss"}
        known = [name for name in self.series if name.startswith("metric:")]
        kept = [*known, *(name for name in metrics if name not in known)][:METRICS]
        return {
            "step": status.step,
            "loss": training.loss,
            "samples": training.samples,
            "step_seconds": training.step_seconds or None,
            **{f"{phase}_seconds": spent_s for phase, spent_s in self._spent_s.items()},
            "bytes_sent": exchange.bytes_sent,
            "bytes_received": exchange.bytes_received,
            "upload_bytes_per_second": None if line is None else line.upload_bytes_per_s,
            "download_bytes_per_second": None if line is None else line.download_bytes_per_s,
            "population": population.estimate,
            # A swarm that is counted has no interval, and no second method.
            "population_low": None if population.exact else population.low,
            "population_high": None if population.exact else population.high,
            "population_zone": None if population.exact else population.zone_estimate,
            "workers": population.workers,
            "training_share": training.training_share,
            **{name: metrics[name] for name in kept if name in metrics},
        }

    def _keep(self, now: float, row: Row) -> None:
        for name in row.keys() - self.series.keys():
            self.series[name] = array("d", [math.nan]) * len(self.times)
        self.times.append(now)
        for name, values in self.series.items():
            values.append(_number(row.get(name)))
        if len(self.times) >= self._rows:
            self._every *= 2
            self.times = self.times[::2]
            self.series = {name: values[::2] for name, values in self.series.items()}


def _number(value: float | None) -> float:
    return math.nan if value is None or not math.isfinite(value) else value
