"""A refusal is believed where this node finds its reason, or cannot tell."""

from __future__ import annotations

import pytest

from training.exchange.client.refusals import is_explained


@pytest.mark.parametrize(
    ("reason", "base_step", "median_step", "explained"),
    [
        ("late", 99, 100, False),
        ("late", 92, 100, False),  # half of the limit: two views may differ by so much
        ("late", 91, 100, True),
        ("late", 99, None, True),  # it has heard of nobody of late: it may have slept
        ("malformed", 99, 100, True),
        ("before_era", 99, 100, True),
        ("out_of_range", 99, 100, True),
        ("a reason of a later version", 99, 100, True),
    ],
)
def test_a_reason_that_is_far_from_true_here_does_not_explain_a_refusal(
    reason: str, base_step: int, median_step: int | None, explained: bool
) -> None:
    """With a staleness limit of 16 steps; what only the owner's state or its version explains is believed."""
    found = is_explained(reason, base_step + 1, base_step, median_step=median_step, furthest_step=10**6, stale_limit=16)
    assert found == explained


def test_without_a_limit_a_late_delta_is_one_of_a_start_that_was_forgotten() -> None:
    """Under asp nothing else is late, and no step tells of it."""
    assert is_explained("late", 100, 99, median_step=100, furthest_step=10**6, stale_limit=None)


@pytest.mark.parametrize(("step", "explained"), [(500, False), (501, True)])
def test_a_step_is_ahead_from_half_of_the_plausible_ones_on(step: int, explained: bool) -> None:
    """The owner's bound may be lower than this node's."""
    assert is_explained("ahead", step, 1, median_step=1, furthest_step=1000, stale_limit=16) == explained
