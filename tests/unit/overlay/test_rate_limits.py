"""Token buckets and their table: who may ask how often, on a clock that is passed in."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlay.rate_limits import ConcurrencyLimit, RateLimit, RateLimiter, TokenBucket

TEN = RateLimit(rate_per_s=10.0, burst=5.0)


def test_a_burst_passes_and_then_the_rate_holds() -> None:
    """Five at once pass, the sixth is told when, and asking at that moment succeeds."""
    bucket = TokenBucket(TEN, now=100.0)

    assert [bucket.take(100.0) for _ in range(5)] == [0.0] * 5
    wait_s = bucket.take(100.0)
    assert wait_s == pytest.approx(0.1)
    assert bucket.take(100.0 + wait_s) == 0.0
    assert bucket.take(100.0 + wait_s) > 0.0


def test_a_rate_of_zero_is_no_limit() -> None:
    """Who sets the rate to zero is never refused."""
    bucket = TokenBucket(RateLimit(0.0, 0.0), now=0.0)

    assert [bucket.take(0.0) for _ in range(1000)] == [0.0] * 1000


def test_a_clock_that_steps_back_neither_gives_nor_takes() -> None:
    """After a step back the bucket stands as it was, and fills again only past the old time."""
    bucket = TokenBucket(TEN, now=10.0)
    for _ in range(5):
        bucket.take(10.0)

    assert bucket.take(3.0) > 0.0
    assert bucket.take(10.05) > 0.0
    assert bucket.take(10.1) == 0.0


def test_more_than_a_bucket_is_had_once_and_leaves_a_debt() -> None:
    """A request larger than the bucket is possible when it is full, and the next waits for the whole debt."""
    bucket = TokenBucket(TEN, now=0.0)

    assert bucket.take(0.0, 20.0) == 0.0
    assert bucket.take(0.0, 1.0) == pytest.approx((1 + 15) / 10)


@given(
    rate=st.floats(0.1, 1000),
    burst=st.floats(1, 100),
    gaps=st.lists(st.floats(0, 5), min_size=1, max_size=200),
)
def test_never_more_than_burst_and_rate_allow(rate: float, burst: float, gaps: list[float]) -> None:
    """What is granted stays below burst + rate · time, whenever it is asked for; whoever waits as told gets it."""
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
    """One who has used its allowance up does not keep another from its own."""
    quotas: RateLimiter[str] = RateLimiter(TEN)
    while not quotas.take("greedy", 0.0):
        pass

    assert quotas.take("modest", 0.0) == 0.0


def test_inventing_parties_does_not_multiply_the_allowance() -> None:
    """With the table full, newcomers share one bucket, and the table does not grow."""
    print("seed 7")
    generator = random.Random(7)
    quotas: RateLimiter[int] = RateLimiter(TEN, max_parties=10)
    granted = sum(not quotas.take(generator.randrange(1 << 60), 0.0) for _ in range(10_000))

    assert len(quotas) == 10
    assert granted == 10 + 5


def test_recovered_parties_make_room_first() -> None:
    """A full table forgets those who have all their tokens back, and keeps who has not."""
    quotas: RateLimiter[str] = RateLimiter(TEN, max_parties=2)
    quotas.take("old", 0.0)
    while not quotas.take("busy", 10.0):
        pass

    assert quotas.take("new", 10.0) == 0.0
    assert quotas.take("busy", 10.0) > 0.0


def test_open_things_are_counted_apart() -> None:
    """Each party has its share; what was closed can be opened again; the table forgets who has nothing open."""
    count: ConcurrencyLimit[str] = ConcurrencyLimit(2)

    assert [count.enter("a"), count.enter("a"), count.enter("a"), count.enter("b")] == [True, True, False, True]
    count.leave("a")
    assert count.enter("a")
    for party in ("a", "a", "b"):
        count.leave(party)
    assert len(count) == 0
