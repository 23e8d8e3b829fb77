"""The run so far, kept for the dashboard: fixed memory, thinned as it grows, and true."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from p2pnode.status.history import METRICS, ROWS, History
from p2pnode.status.schema import Status
from tests.process.harness.fake_node import STATUS


def status(step: int = 0, **training: Any) -> Status:
    """A status of the fake node with other figures."""
    changed = msgspec.structs.replace(STATUS.training, step_seconds=0.0, **training)
    return msgspec.structs.replace(STATUS, step=step, training=changed)


def filled(looks: int, rows: int = 8) -> History:
    """A history whose step is the time, looked at once a second."""
    history = History(rows)
    for time in range(looks):
        history.look(float(time), status(step=time), [])
    return history


@given(looks=st.integers(1, 200), rows=st.integers(4, 12).map(lambda half: 2 * half))
def test_the_rows_are_bounded_evenly_spread_and_as_they_were(looks: int, rows: int) -> None:
    """At any moment: fewer rows than the bound, the first look among them, equal distances, and the values of looks."""
    history = filled(looks, rows)

    times = history.times.tolist()
    assert 1 <= len(times) < rows
    assert times[0] == 0.0
    assert len({later - earlier for earlier, later in pairwise(times)}) <= 1
    assert history.series["step"].tolist() == times
    assert looks - 1 - times[-1] < 4 * max(1, looks / rows)


def test_until_it_is_full_nothing_is_thinned_and_then_every_second_row_goes() -> None:
    """Of rows of one second: seven are all there, of eight four."""
    assert filled(7).times.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert filled(8).times.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert filled(11).times.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


def test_the_newest_row_is_there_too() -> None:
    """A page that adds rows of each second finds the one before, however far apart those that are kept are."""
    history = filled(12)

    assert history.times.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    times, series = history.kept()
    assert times == series["step"] == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 11.0]
    assert History().kept() == ([], {})


def test_the_memory_of_a_month_is_that_of_a_photograph() -> None:
    """All columns take less than a quarter of a megabyte, however long a node runs."""
    history = filled(3 * ROWS, ROWS)

    assert sum(values.itemsize * len(values) for values in history.series.values()) < 250_000


def test_a_missing_value_is_a_gap_and_so_is_the_time_before_a_column() -> None:
    """Null and infinite values are no zero. A metric that comes later has no values before."""
    history = History()
    history.look(1.0, status(loss=None), [])
    history.look(2.0, status(loss=math.inf, metrics={"accuracy": 0.5}), [])

    assert all(math.isnan(value) for value in history.series["loss"])
    assert math.isnan(history.series["metric:accuracy"][0])
    assert history.series["metric:accuracy"][1] == 0.5


def test_a_look_that_is_not_later_is_left_out() -> None:
    """Two looks at one moment, or a clock that stands still, leave one row: a chart's time only rises."""
    history = History()
    for time in (1.0, 1.0, 0.5, 2.0):
        history.look(time, status(), [])

    assert history.times.tolist() == [1.0, 2.0]


def test_the_seconds_of_steps_are_counted_once_each() -> None:
    """Those that have ended since the first look, by phase."""
    history = History()
    first: Any = {"step": 4, "train_seconds": 100.0}
    second: Any = {"step": 5, "train_seconds": 2.0, "push_seconds": 1.0, "wait_seconds": 0.5, "pull_seconds": 0.5}

    assert history.look(1.0, status(step=4), [first])["train_seconds"] == 0.0
    for now in (2.0, 3.0):
        row = history.look(now, status(step=5), [first, second])
        assert [row[f"{phase}_seconds"] for phase in ("train", "push", "wait", "pull")] == [2.0, 1.0, 0.5, 0.5]


def test_the_first_metrics_are_kept_beside_the_loss() -> None:
    """Under their names; a fifth is left out."""
    history = History()
    named = {f"m{number}": float(number) for number in range(METRICS + 1)}

    row = history.look(1.0, status(metrics={"loss": 9.0, **named}), [])

    expected = {f"metric:m{number}": float(number) for number in range(METRICS)}
    assert {name: value for name, value in row.items() if name.startswith("metric")} == expected
    assert {name for name in history.series if name.startswith("metric")} == set(expected)
