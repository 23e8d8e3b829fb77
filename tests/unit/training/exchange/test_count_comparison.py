"""Counts of the nodes that train, of this node and of others."""

from __future__ import annotations

import pytest

from training.exchange.swarm_view import LASTING_S, MAX_MEMBERS, CountComparison, corrected

A, B = b"a" * 20, b"b" * 20


@pytest.mark.parametrize(
    ("theirs", "mine", "exact", "expected"),
    [
        (2.0, 6.0, True, 0.5 * 2 / 6),
        (5.0, 6.0, True, 0.5 * 5 / 6),
        (6.0, 2.0, True, 0.5),
        (20.0, 21.0, True, 0.5),
        (30.0, 40.0, False, 0.5),
        (11.0, 40.0, False, 0.5 * 11 / 40),
        (0.0, 6.0, True, 0.5),
    ],
    ids=["hidden", "one is missing", "the owner knows fewer", "about equal", "estimates", "no estimate", "not said"],
)
def test_a_weight_is_corrected_to_the_larger_count(theirs: float, mine: float, exact: bool, expected: float) -> None:
    """Where the counts differ by more than chance, and only down: nobody counts nodes that are not there for long."""
    assert corrected(0.5, theirs, mine, exact=exact) == pytest.approx(expected)


def test_a_difference_that_lasts_is_named() -> None:
    """From the second count on that says so, in either direction, until one agrees."""
    counts = CountComparison()
    for now in (0.0, LASTING_S / 2):
        counts.note(A, 2.0, 6.0, exact=True, now=now)
        counts.note(B, 6.0, 2.0, exact=True, now=now)
        assert counts.lasting() == []
    counts.note(A, 2.0, 6.0, exact=True, now=LASTING_S)
    assert counts.lasting() == [(A, 2.0)]
    counts.note(B, 6.0, 2.0, exact=True, now=LASTING_S)
    assert counts.lasting() == [(A, 2.0), (B, 6.0)]
    counts.note(A, 6.0, 6.0, exact=True, now=LASTING_S)
    assert counts.lasting() == [(B, 6.0)]


def test_views_that_differ_for_a_moment_are_no_difference() -> None:
    """Somebody has just come or gone; steps may take minutes; an older version says nothing."""
    counts = CountComparison()
    counts.note(A, 5.0, 6.0, exact=True, now=0.0)
    counts.note(A, 6.0, 6.0, exact=True, now=600.0)
    counts.note(A, 6.0, 7.0, exact=True, now=1200.0)
    for now in (0.0, 100.0):
        counts.note(B, 0.0, 6.0, exact=True, now=now)
    assert counts.lasting() == []


def test_the_members_that_are_remembered_are_bounded() -> None:
    """The one that was heard longest ago is forgotten."""
    counts = CountComparison()
    for now in (0.0, LASTING_S):
        for number in range(MAX_MEMBERS + 1):
            counts.note(number.to_bytes(20, "big"), 1.0, 9.0, exact=True, now=now)
    assert len(counts.lasting()) <= MAX_MEMBERS
