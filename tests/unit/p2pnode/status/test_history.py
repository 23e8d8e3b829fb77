"""The figures kept for the dashboard: fixed memory, fine at the end, coarse before, in order, and true."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pnode.status.history import FACTOR, LEVELS, POINTS, History
from p2pnode.status.samples import COLUMNS

SMALL = {"points": 8, "levels": 3}


def filled(rows: int, **sizes: int) -> History:
    """A history of one column whose value is the time, once a second."""
    history = History(["value"], **sizes)
    for time in range(rows):
        history.add(float(time), {"value": float(time)})
    return history


def test_the_last_rows_are_all_there() -> None:
    """Until the first ring is full nothing is thinned, and every value is as it was given."""
    kept = filled(8, **SMALL).kept()

    assert kept.times == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert kept.series == {"value": kept.times}


def test_older_rows_are_means_of_four() -> None:
    """Beyond the first ring a row stands for four, at the time of the first of them; beyond the second for sixteen."""
    kept = filled(64, **SMALL).kept()

    assert kept.times[-8:] == [float(time) for time in range(56, 64)]
    fours = [(time, value) for time, value in zip(kept.times, kept.series["value"], strict=True) if 32.0 <= time < 56.0]
    assert fours == [(time, time + 1.5) for time in (32.0, 36.0, 40.0, 44.0, 48.0, 52.0)]
    assert kept.times[:2] == [0.0, 16.0]
    assert kept.series["value"][:2] == [7.5, 23.5]


def test_a_gap_is_no_value_and_no_zero() -> None:
    """Missing, null, NaN and infinite values are gaps; a mean is that of the values there are; four gaps are one."""
    history = History(["value"], **SMALL)
    for time, value in enumerate([1.0, None, math.nan, 3.0, None, math.inf, None, -math.inf] + [5.0] * 8):
        history.add(float(time), {} if value is None and time == 4 else {"value": value})

    kept = history.kept()

    assert kept.times[:2] == [0.0, 4.0]
    assert kept.series["value"][0] == 2.0
    assert math.isnan(kept.series["value"][1])


def test_a_row_that_is_not_later_is_left_out() -> None:
    """Two looks at the same moment, or a clock that stands still, leave one row: a chart's time only rises."""
    history = History(["value"], **SMALL)
    for time in (1.0, 1.0, 0.5, 2.0):
        history.add(time, {"value": time})

    assert history.kept().times == [1.0, 2.0]


def test_five_digits_are_kept() -> None:
    """A chart shows no more, and JSON stays short."""
    history = History(["value"], **SMALL)
    history.add(1.0, {"value": 0.123456789})
    history.add(2.0, {"value": 123456789.0})

    assert history.kept().series["value"] == [0.12346, 123460000.0]


def test_an_unknown_column_is_refused() -> None:
    """A figure that nobody reads is a mistake of the caller."""
    with pytest.raises(ValueError, match="no column 'other'"):
        History(["value"]).add(1.0, {"other": 1.0})
    with pytest.raises(ValueError, match="twice"):
        History(["value", "value"])
    with pytest.raises(ValueError, match="at least one level"):
        History(["value"], points=2)


def test_the_memory_of_the_dashboard_is_that_of_a_photograph() -> None:
    """All columns and levels take less than half a megabyte, from the start on."""
    history = History(COLUMNS)
    before = history.size_bytes
    for time in range(3000):
        history.add(float(time), {"step": float(time)})

    assert history.size_bytes == before < 500_000


def test_it_reaches_back_two_days() -> None:
    """The coarsest level has rows of 17 minutes, 240 of them."""
    assert POINTS * FACTOR ** (LEVELS - 1) > 2 * 86_400


VALUES = st.none() | st.floats(-1e6, 1e6).map(lambda value: round(value, 3))


@given(
    rows=st.lists(st.tuples(st.floats(0.001, 1000.0), VALUES), max_size=300),
    points=st.integers(FACTOR, 12),
    levels=st.integers(1, 4),
)
def test_whatever_is_added_the_rows_stay_bounded_ordered_and_within_range(
    rows: list[tuple[float, float | None]], points: int, levels: int
) -> None:
    """At any moment: times rise strictly, there are at most points × levels rows, the newest row is the last added,
    the newest rows are exact, every value lies between the least and the largest added, and memory has not grown."""
    history = History(["value"], points=points, levels=levels)
    size_bytes = history.size_bytes
    now, times, values = 0.0, [], []
    for passed, value in rows:
        now += passed
        history.add(now, {"value": value})
        times.append(now)
        values.append(value)

    kept = history.kept()

    assert history.size_bytes == size_bytes
    assert len(kept.times) == len(kept.series["value"]) <= points * levels
    assert all(earlier < later for earlier, later in zip(kept.times, kept.times[1:], strict=False))
    exact = min(points, len(times))
    assert kept.times[len(kept.times) - exact :] == times[len(times) - exact :]
    given_values = [value for value in values if value is not None]
    for value in kept.series["value"]:
        if not math.isnan(value):
            slack = 1e-4 * max(abs(one) for one in given_values)
            assert min(given_values) - slack <= value <= max(given_values) + slack
    shown = [None if math.isnan(value) else value for value in kept.series["value"]][len(kept.times) - exact :]
    assert shown == pytest.approx(values[len(values) - exact :], rel=1e-4)
    # No stretch is lost between two levels: while the coarsest has room, the first row is there.
    if times and len(times) <= points * FACTOR ** (levels - 1):
        assert kept.times[0] == times[0]
