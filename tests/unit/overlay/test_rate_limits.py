"""Token buckets and their table, on a clock that is passed in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pnode.overlay.rate_limits import MAX_PARTIES, RateLimit, RateLimiter, TokenBucket

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
