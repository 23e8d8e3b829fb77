"""Numbers for people."""

from __future__ import annotations

import math

import pytest

from p2pnode.terminal.numbers import duration, number, rate, share, short, size


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
