"""Time-outs of calls, from measured round trips."""

from __future__ import annotations

import pytest

from overlay.kademlia.round_trips import RttEstimator


def test_waits_follow_the_measured_round_trips() -> None:
    """Unmeasured 0.25 s; then mean + 4 deviations between 0.1 s and the ceiling, retry included."""
    trips = RttEstimator(0.5)
    assert trips.waits(None) == (0.25, 0.25)
    for _ in range(50):
        trips.observe(0.002)
    assert trips.waits(None) == (0.1, 0.1)
    for _ in range(50):
        trips.observe(0.4)
    first, second = trips.waits(None, stretch=2.0)
    assert first + second == pytest.approx(1.0)
