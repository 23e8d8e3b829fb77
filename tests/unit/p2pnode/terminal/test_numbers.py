"""Numbers for people, small curves and bars."""

from __future__ import annotations

import math

import pytest

from p2pnode.terminal.lines import cells
from p2pnode.terminal.numbers import bar, curve, duration, left_seconds, number, progress_text, rate, share, short, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.31, "0.310"), (0.9996, "1.00"), (12.34, "12.3"), (123.4, "123"), (1234.5, "1234"), (0.0123, "0.0123"),
        (0.00099996, "0.00100"), (2.5e-05, "2.50e-05"), (-0.5, "-0.500"), (0.0, "0"), (412, "412"), (None, "-"),
        (True, "-"), ("x", "-"), (math.nan, "nan"), (math.inf, "inf"), (99.96, "100"), (9.996, "10.0"),
    ],
)  # fmt: skip
def test_floats_have_three_digits(value: object, text: str) -> None:
    """Three significant digits with their zeros; whole numbers have all of theirs; anything else is a dash."""
    assert number(value) == text


def test_sizes_and_rates_are_decimal() -> None:
    """Three digits and a decimal unit, which is the next one before a fourth digit would be needed."""
    assert [size(count) for count in (999, 1000, 1_500_000, 999_600, 2e15, None, True)] == [
        "999 B", "1.00 kB", "1.50 MB", "1.00 MB", "2000 TB", "-", "-",
    ]  # fmt: skip
    assert (rate(12_345), rate(None)) == ("12.3 kB/s", "-")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"), (0.0123, "12.3 ms"), (0.9996, "1.0 s"), (3.21, "3.2 s"), (9.96, "10 s"), (59.6, "1 min"),
        (192, "3 min 12 s"), (3599.6, "1 h"), (7500, "2 h 5 min"), (86400 * 3 + 4 * 3600, "3 d 4 h"), (-1, "0 s"),
        (None, "-"), (math.inf, "-"),
    ],
)  # fmt: skip
def test_durations_have_at_most_two_units(seconds: object, text: str) -> None:
    """The unit fits the size, and a rounded value never says 60 seconds."""
    assert duration(seconds) == text


def test_shares_and_ids() -> None:
    """A share is in per cent; an id is shown by its first eight digits."""
    assert (share(0.724), share(None), short("ab" * 20), short(None)) == ("72 %", "-", "abababab", "-")


def test_a_curve_goes_from_the_lowest_to_the_highest_value() -> None:
    """A block per value, or the mean of several; a flat curve stays at the bottom; what is missing is left out."""
    assert curve([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert curve([7, 7, 0, 0], 2) == "█▁"
    assert curve([3.0] * 5, 10) == "▁▁▁▁▁"
    assert curve([None, math.nan, math.inf, 1.0, 2.0], 10) == "▁█"
    assert (curve([], 10), curve([1.0], 0)) == ("", "")
    assert all(len(curve(list(range(count)), 40)) == min(count, 40) for count in (1, 39, 41, 1000))


def test_a_bar_is_as_full_as_the_work_is_done() -> None:
    """It never leaves its width, whatever the share."""
    assert [bar(share, 4) for share in (0.0, 0.5, 1.0, 7.0, -1.0, math.nan)] == [
        "░░░░", "██░░", "████", "████", "░░░░", "░░░░",
    ]  # fmt: skip


def test_the_time_to_go_follows_from_what_is_done() -> None:
    """A quarter in ten seconds leaves thirty; before anything is done nobody knows."""
    assert left_seconds(25, 100, 10.0) == 30.0
    assert left_seconds(0, 100, 10.0) is None
    assert left_seconds(120, 100, 10.0) == 0.0


def test_progress_is_one_line_with_the_time_to_go() -> None:
    """It names the work, how much of how much, and the time; without a total, the time that passed."""
    text = progress_text("download", 5e6, 10e6, "bytes", 12.4)
    assert text.startswith("download  █")
    assert text.endswith("5.00 MB of 10.0 MB  12 s to go")
    assert progress_text("checkpoint", 0, 0, "", None, passed_s=3.2) == "checkpoint  for 3.0 s"
    assert progress_text("steps", 1000, 1000, "steps", 3.0).endswith("1000 of 1000 steps")
    assert progress_text("share", 0.5, 1.0, "%", None).endswith(" 50 %")
    assert cells(progress_text("download of the state", 5e6, 10e6, "bytes", 7200, width=40)) <= 60
