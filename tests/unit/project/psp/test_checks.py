"""Claims about order and shape: each fails on values that contradict it."""

from __future__ import annotations

import pytest

from tools.psp.checks import CHECKS, Check
from tools.psp.points import Values, points


def geometric(figure: str, ratio: float) -> Values:
    """Values for every point of a figure; each is `ratio` times the one before."""
    wanted = [point for point in points() if point.figure == figure]
    return {(figure, point.series, point.x): 1000.0 * ratio**number for number, point in enumerate(wanted)}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.text)
def test_a_claim_reads_points_that_exist_and_can_fail(check: Check) -> None:
    """Evaluated on values that only rise and on values that only fall, no claim holds for both."""
    assert not all(check.holds(geometric(check.figure, ratio)) for ratio in (1.5, 0.5))
