"""How long to wait: silence that ends with bytes, time-outs from measured round trips and own lag, and rates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.kademlia.calls import CallTimes
from p2pnode.overlay.peers import PeerTable
from p2pnode.overlay.rate_limits import MAX_PARTIES, RateLimit, RateLimiter, TokenBucket
from p2pnode.overlay.waits import LAG_S, LOOKS, MAX_SCORE, LocalHealth, Silence
from tests.harness.builders.peers import heartbeat

TIMEOUT_S = 4.0


def given_up_at(
    moved_bytes: Callable[[float], int], *, own_turn_until_s: float = -1.0, limit_s: float = 100.0
) -> float:
    """The time at which a wait that began at 0 is given up; looks come when they are asked for."""
    silence, now_s, left_s = Silence(TIMEOUT_S, 0.0, moved_bytes(0.0)), 0.0, TIMEOUT_S / LOOKS
    while left_s and now_s < limit_s:
        now_s += left_s
        left_s = silence.look(now_s, moved_bytes(now_s), is_own_turn=now_s <= own_turn_until_s)
    return now_s


def test_nothing_moves() -> None:
    """The wait ends at its timeout, not a look later."""
    assert given_up_at(lambda _now: 7) == pytest.approx(TIMEOUT_S, rel=2e-3)


@pytest.mark.parametrize("rate", [1, 1000])
def test_what_moves_is_waited_for(rate: int) -> None:
    """However slow: a byte per second for longer than any timeout is no silence."""
    assert given_up_at(lambda now: int(now * rate)) >= 100.0


@pytest.mark.parametrize("died_s", [0.3, 2.0, 9.9, 31.4])
def test_a_peer_that_dies_is_given_up_within_the_timeout(died_s: float) -> None:
    """Counted from its last byte: never later than the timeout, and at most one look earlier."""
    waited_s = given_up_at(lambda now: int(1000 * min(now, died_s))) - died_s
    assert TIMEOUT_S * (1 - 1.01 / LOOKS) <= waited_s <= TIMEOUT_S * 1.001


def test_time_in_which_this_side_produces_does_not_count() -> None:
    """The timeout starts when the peer has something to acknowledge again."""
    assert given_up_at(lambda _now: 0, own_turn_until_s=20.0) == pytest.approx(20.0 + TIMEOUT_S, rel=2e-3)


def test_a_count_that_falls_is_no_movement() -> None:
    """A look that fails gives a smaller number; the right one after it is nothing new."""
    assert given_up_at(lambda now: 0 if 1.0 < now < 3.0 else 10) <= TIMEOUT_S * 1.001


def test_waits_follow_the_measured_round_trips() -> None:
    """Unmeasured 0.25 s; then mean + 4 deviations between 0.1 s and the ceiling, retry included."""
    trips = CallTimes(0.5)
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
    trips = CallTimes(2.0)
    for _ in range(50):
        trips.observe(0.05)
    table = PeerTable()
    for _ in range(50):
        table.observe(heartbeat(), Address("10.0.0.1", 8468), 0.0, 0.4)
    distant = table.get(heartbeat().node_id)
    assert distant is not None

    assert trips.waits(distant)[0] == pytest.approx(0.4, abs=0.01)
    assert trips.waits(None)[0] == pytest.approx(0.1, abs=0.01)


def test_late_ticks_stretch_time_outs_and_punctual_ones_shrink_them() -> None:
    """The score rises and falls by one, never below zero; time-outs are at most eight times as long."""
    health = LocalHealth()
    lagged = [health.on_tick(lag_s) for lag_s in (0.0, 2 * LAG_S, 2 * LAG_S, LAG_S)]

    assert lagged == [False, True, True, False]
    assert (health.score, health.stretch) == (1, 2.0)
    health.on_tick(0.0)
    health.on_tick(0.0)
    assert (health.score, health.stretch) == (0, 1.0)
    for _ in range(20):
        health.worsen()
    assert health.score == MAX_SCORE


TEN = RateLimit(rate_per_s=10.0, burst=5.0)


def test_a_burst_passes_and_then_the_rate_holds() -> None:
    """Five at once pass; the sixth gets the time to wait, and succeeds after it."""
    bucket = TokenBucket(TEN, now=100.0)

    assert [bucket.take(100.0) for _ in range(5)] == [0.0] * 5
    wait_s = bucket.take(100.0)
    assert wait_s == pytest.approx(0.1)
    assert bucket.take(100.0 + wait_s) == 0.0
    assert bucket.take(100.0 + wait_s) > 0.0


def test_a_clock_that_steps_back_neither_gives_nor_takes() -> None:
    """After a step back the bucket is unchanged, and fills again only after the old time."""
    bucket = TokenBucket(TEN, now=10.0)
    for _ in range(5):
        bucket.take(10.0)

    assert bucket.take(3.0) > 0.0
    assert bucket.take(10.05) > 0.0
    assert bucket.take(10.1) == 0.0


@given(
    rate=st.floats(0.1, 1000),
    burst=st.floats(1, 100),
    gaps=st.lists(st.floats(0, 5), min_size=1, max_size=200),
)
def test_never_more_than_burst_and_rate_allow(rate: float, burst: float, gaps: list[float]) -> None:
    """The total granted stays below burst + rate · time for any timing; waiting the time given always succeeds."""
    bucket = TokenBucket(RateLimit(rate, burst), now=0.0)
    now = 0.0
    for granted, gap in enumerate(gaps, 1):
        now += gap
        wait_s = bucket.take(now)
        if wait_s:
            now += wait_s
            assert bucket.take(now) == 0.0

        assert granted <= burst + rate * now + 1e-5 * granted


def test_parties_do_not_take_from_each_other() -> None:
    """A party at its limit does not restrict another one."""
    limits: RateLimiter[str] = RateLimiter(TEN)
    while not limits.take("greedy", 0.0):
        pass

    assert limits.take("modest", 0.0) == 0.0


def test_the_parties_are_bounded() -> None:
    """The one that asked longest ago is forgotten; one that goes on asking keeps its limit."""
    limits: RateLimiter[int] = RateLimiter(TEN)
    for party in range(2 * MAX_PARTIES):
        limits.take(party, 0.0)
        refused = limits.take(-1, 0.0)

    assert len(limits) == MAX_PARTIES
    assert refused > 0.0
