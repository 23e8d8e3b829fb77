"""Small curves, bars and lines of progress."""

from __future__ import annotations

import math

from p2pnode.terminal.lines import cells
from p2pnode.terminal.numbers import bar, curve, left_seconds, progress_text


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
