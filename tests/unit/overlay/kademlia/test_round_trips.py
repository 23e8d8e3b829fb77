"""Time-outs of calls, from measured round trips."""

from __future__ import annotations

import pytest

from overlay.kademlia.round_trips import RttEstimator
from overlay.peer_table import PeerTable
from tests.harness.builders.peers import heartbeat


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


def test_a_peer_with_round_trips_of_its_own_has_waits_of_its_own() -> None:
    """A distant peer is waited for longer than the mean of all suggests, and a near one not."""
    trips = RttEstimator(2.0)
    for _ in range(50):
        trips.observe(0.05)
    table = PeerTable()
    for _ in range(50):
        table.observe(heartbeat(), "10.0.0.1", 0.0, 0.4)
    distant = table.get(heartbeat().node_id)
    assert distant is not None

    assert trips.waits(distant)[0] == pytest.approx(0.4, abs=0.01)
    assert trips.waits(None)[0] == pytest.approx(0.1, abs=0.01)
