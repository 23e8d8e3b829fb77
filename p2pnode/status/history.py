"""Keeps the figures of the dashboard's charts in fixed memory: the last minutes fine, older ones ever coarser.

A round-robin database in memory (after RRDtool, Oetiker 1999). Every level is a ring of rows. A row of the next level
is the mean of `FACTOR` rows of the one before, at the time of the first of them. All memory is taken at the start, so a
node that runs for a month keeps no more than one that runs for a day. Times are monotonic seconds and only rise. Pure.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

#: Rows per level, and rows of one level that become one of the next.
POINTS, FACTOR = 240, 4
#: Levels: with a row per second they reach back 4 minutes, 16 minutes, 1 hour, 4 hours, 17 hours and 2.8 days.
LEVELS = 6
#: Significant digits kept: enough for a chart, and short in JSON.
DIGITS = 5

NAN = math.nan


class Kept(NamedTuple):
    """All rows, oldest first: their times, and per column its values, NaN where there was none."""

    times: list[float]
    series: dict[str, list[float]]


class _Ring:
    """One level: a ring per column, and the sums that will be the next row of the level above."""

    def __init__(self, columns: int, points: int) -> None:
        self.points = points
        self.times = array("d", [NAN]) * points
        self.values = [array("d", [NAN]) * points for _ in range(columns)]
        self.written = 0
        self._sums = [0.0] * columns
        self._counts = [0] * columns
        self._rows = 0
        self._began = NAN

    def write(self, time: float, row: Sequence[float]) -> None:
        place = self.written % self.points
        self.times[place] = time
        for column, value in zip(self.values, row, strict=True):
            column[place] = value
        self.written += 1

    def collect(self, time: float, row: Sequence[float]) -> tuple[float, list[float]] | None:
        """Add a row to the sums. When there are `FACTOR` rows: the time of the first, and their means; a gap counts as
        no value. The first, so that the row is older than those that are kept one by one after it."""
        if not self._rows:
            self._began = time
        for index, value in enumerate(row):
            if value == value:  # not NaN
                self._sums[index] += value
                self._counts[index] += 1
        self._rows += 1
        if self._rows < FACTOR:
            return None
        means = [total / count if count else NAN for total, count in zip(self._sums, self._counts, strict=True)]
        self._sums, self._counts, self._rows = [0.0] * len(means), [0] * len(means), 0
        return self._began, means

    def oldest(self) -> float:
        """Time of the oldest row; infinite while there is none."""
        if not self.written:
            return math.inf
        return self.times[self.written % self.points if self.written > self.points else 0]

    def before(self, time: float) -> list[int]:
        """Places of the rows older than `time`, oldest first."""
        first = max(0, self.written - self.points)
        places = [number % self.points for number in range(first, self.written)]
        return [place for place in places if self.times[place] < time]


class History:
    """Rows of the same columns at rising times."""

    def __init__(self, columns: Sequence[str], *, points: int = POINTS, levels: int = LEVELS) -> None:
        if len(set(columns)) != len(columns):
            raise ValueError("a column's name comes twice")
        if points < FACTOR or levels < 1:
            raise ValueError(f"a history has at least one level of {FACTOR} points")
        self.columns = tuple(columns)
        self._levels = [_Ring(len(self.columns), points) for _ in range(levels)]
        self._last = -math.inf

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows, from the start on."""
        return sum(ring.points * 8 * (len(self.columns) + 1) for ring in self._levels)

    def add(self, time: float, row: Mapping[str, float | None]) -> None:
        """Append one row. A missing, null or infinite value is a gap. Raises `ValueError` for an unknown column.

        A row that is not later than the last one is left out: a chart's time only rises.
        """
        if unknown := row.keys() - set(self.columns):
            raise ValueError(f"the history has no column {sorted(unknown)[0]!r}")
        if not time > self._last:
            return
        self._last = time
        values = [_kept(row.get(column)) for column in self.columns]
        for ring in self._levels:
            ring.write(time, values)
            if (coarser := ring.collect(time, values)) is None:
                return
            time, values = coarser[0], [_kept(value) for value in coarser[1]]

    def kept(self) -> Kept:
        """Every row that is kept. Where two levels have the same time span, only the finer rows."""
        times: list[float] = []
        series: dict[str, list[float]] = {column: [] for column in self.columns}
        for level in reversed(range(len(self._levels))):
            ring = self._levels[level]
            until = self._levels[level - 1].oldest() if level else math.inf
            places = ring.before(until)
            times += [ring.times[place] for place in places]
            for column, values in zip(self.columns, ring.values, strict=True):
                series[column] += [values[place] for place in places]
        return Kept(times, series)


def _kept(value: float | None) -> float:
    if value is None or not math.isfinite(value):
        return NAN
    return float(f"{value:.{DIGITS}g}")
