"""What a probe shows: full lines, lower bounds of faster ones, and nothing where it is not the line that is seen."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlay.capacity import AT_LEAST, UNKNOWN, class_of, split, weight_exponents
from overlay.line_probe.estimate import (
    MIN_DECIDED_BYTES,
    PROBE_BYTES,
    Estimate,
    Reading,
    announced,
    better,
    estimate,
    full_rate,
)

MBIT = 125_000.0
#: Bytes of the first round trip of a connection: ten segments.
FIRST_WINDOW = 14_600


def transfer(
    bytes_per_s: float,
    round_trip_s: float,
    *,
    growth: float = 2.0,
    within_s: float = 2.0,
    stops_at: int = PROBE_BYTES,
    jitter: Callable[[], float] = lambda: 0.0,
) -> list[Reading]:
    """The readings of a young connection over a line, whose window grows by `growth` in each round trip; what arrives
    is acknowledged a round trip after it was sent, segment by segment. `jitter`: seconds by which a segment and those
    behind it are late, another number every 50 ms."""
    acknowledged: list[tuple[float, int]] = [(0.0, 0)]
    window, sent, free_s, begins_s = float(FIRST_WINDOW), 0, 0.0, 0.0
    while sent < PROBE_BYTES and begins_s < within_s:
        free_s = max(free_s, begins_s)
        late_s = jitter()
        for _ in range(max(int(window) // 1460, 1)):
            sent = min(sent + 1460, PROBE_BYTES)
            free_s += 1460 / bytes_per_s
            if int(free_s / 0.05) != int((free_s - 1460 / bytes_per_s) / 0.05):
                late_s = jitter()
            acknowledged.append((max(free_s + round_trip_s + late_s, acknowledged[-1][0]), sent))
        # The next window begins when the first segment of this one is acknowledged, if the line is free by then.
        begins_s = max(begins_s + round_trip_s, free_s)
        window *= growth
    readings, at_s, number = [], 0.0, 0
    while at_s < within_s:
        while number + 1 < len(acknowledged) and acknowledged[number + 1][0] <= at_s:
            number += 1
        readings.append(Reading(at_s, min(acknowledged[number][1], stops_at)))
        if readings[-1].acknowledged_bytes >= PROBE_BYTES:
            break
        at_s += max(0.001, 0.02 * at_s)
    return readings


def decided(readings: list[Reading], round_trip_s: float) -> tuple[Estimate | None, float, int]:
    """What a probe finds, after how many seconds and bytes: it ends as soon as it has seen a full line."""
    for count in range(1, len(readings) + 1):
        if (found := full_rate(readings[:count], round_trip_s)) is not None:
            return found, readings[count - 1].at_s, readings[count - 1].acknowledged_bytes
    return estimate(readings, round_trip_s), readings[-1].at_s, readings[-1].acknowledged_bytes


@given(
    mbit=st.floats(1.0, 20.0),
    round_trip_s=st.floats(0.0005, 0.16),
    growth=st.sampled_from([1.5, 2.0]),
)
def test_a_slow_line_is_measured_within_two_seconds(mbit: float, round_trip_s: float, growth: float) -> None:
    """From 1 to 20 Mbit/s and at all distances the mean rate, within a tenth: the line was full, and nothing else."""
    found, _, _ = decided(transfer(mbit * MBIT, round_trip_s, growth=growth), round_trip_s)

    # Too far away for so fast a line, the window fills it late.
    is_far = mbit * MBIT * round_trip_s > 100_000
    assert is_far or (found is not None and found.is_exact)
    assert found is None or found.bytes_per_s == pytest.approx(mbit * MBIT, rel=0.1)


@given(
    mbit=st.floats(60.0, 2000.0),
    round_trip_s=st.floats(0.0005, 0.2),
    growth=st.sampled_from([1.5, 2.0]),
)
def test_a_fast_line_gives_a_lower_bound_and_is_never_taken_for_a_full_one(
    mbit: float, round_trip_s: float, growth: float
) -> None:
    """However far the receiver is and however slowly the window grows: never exact, never above the line."""
    found, _, _ = decided(transfer(mbit * MBIT, round_trip_s, growth=growth), round_trip_s)

    if found is not None:
        assert not found.is_exact
        assert found.bytes_per_s <= mbit * MBIT * 1.01


@given(
    mbit=st.floats(5.0, 40.0),
    round_trip_s=st.floats(0.02, 0.08),
    jitter_s=st.floats(0.0, 0.05),
    seed=st.integers(0, 999),
)
def test_jitter_changes_an_estimate_by_less_than_a_class(
    mbit: float, round_trip_s: float, jitter_s: float, seed: int
) -> None:
    """Acknowledgements that come late and then together: of equal lines none seems twice as fast as another."""
    rng = random.Random(seed)
    readings = transfer(mbit * MBIT, round_trip_s, jitter=lambda: rng.uniform(0.0, jitter_s))
    found, _, _ = decided(readings, round_trip_s + rng.uniform(0.0, jitter_s))

    assert found is not None
    assert found.bytes_per_s == pytest.approx(mbit * MBIT, rel=0.4)


def test_a_line_of_5_mbit_beside_lines_of_100_is_below_the_floor() -> None:
    """At 30 ms one way: half a second and less than 400 KB show it, and what the others announce puts it below."""
    slow, seconds, sent_bytes = decided(transfer(5 * MBIT, 0.06), 0.06)
    fast, fast_s, _ = decided(transfer(100 * MBIT, 0.06), 0.06)

    assert slow is not None
    assert fast is not None
    assert seconds < 0.7
    assert sent_bytes < 400_000
    assert fast_s < 0.6
    capacities = {b"slow": announced(slow, []), **{bytes([n]): announced(fast, []) for n in range(3)}}
    assert weight_exponents(capacities) == {b"slow": None, b"\0": 0, b"\1": 0, b"\2": 0}


def test_on_a_fast_line_nearby_a_probe_takes_milliseconds() -> None:
    """1 Gbit/s and 0.3 ms: 20 ms, and a bound within two classes of the line."""
    found, seconds, _ = decided(transfer(1000 * MBIT, 0.0003), 0.0003)

    assert found is not None
    assert not found.is_exact
    assert seconds < 0.02
    assert class_of(found.bytes_per_s) >= class_of(1000 * MBIT) - 2


def test_a_receiver_that_stops_shows_nothing() -> None:
    """A hung process takes what fits its socket; that is no slow line. Nor is one that takes next to nothing."""
    assert estimate(transfer(100 * MBIT, 0.06, stops_at=300_000), 0.06) is None
    assert estimate(transfer(100 * MBIT, 0.06, stops_at=0), 0.06) is None
    assert estimate(transfer(100 * MBIT, 0.06, stops_at=5000), 0.06) is None
    assert estimate([], 0.06) is None
    moved = [Reading(0.1 * n, min(8_000 * n, 64_000)) for n in range(21)]
    assert estimate(moved[:10], 0.06) is not None
    assert estimate(moved, 0.06) is None


def test_a_late_process_is_no_full_line() -> None:
    """The same readings as of a slow line, but late ones: its processor may have been what was slow."""
    readings = transfer(5 * MBIT, 0.06)
    assert estimate(readings, 0.06) is not None
    late = [Reading(each.at_s, each.acknowledged_bytes, 0.6 * 0.02 * each.at_s) for each in readings]

    assert estimate(late, 0.06) is None
    assert full_rate(late, 0.06) is None


def test_a_distant_receiver_needs_longer_to_show_a_full_line() -> None:
    """What took two round trips may have waited for the window: the same readings are full over a short way only."""
    readings = [Reading(0.1 * n, 20_000 * n) for n in range(11)]

    assert full_rate(readings, 0.1) == Estimate(pytest.approx(200_000.0), True)
    assert full_rate(readings, 0.3) is None
    assert readings[-1].acknowledged_bytes > MIN_DECIDED_BYTES


def test_bytes_that_are_acknowledged_in_pieces_count_from_the_beginning_of_their_wait() -> None:
    """16 KiB every tenth of a second, read ten times as often: the time before the first piece of the half counts."""
    readings = [Reading(0.01 * n, (1 << 14) * (n // 10)) for n in range(171)]

    assert full_rate(readings, 0.01) == Estimate(pytest.approx((1 << 14) / 0.1, rel=0.01), True)


def test_of_two_receivers_the_better_one_counts() -> None:
    """A receiver that is slow, or says so little, lowers nothing; at the same rate the bound counts."""
    slow, fast, bound = Estimate(6e5, True), Estimate(2e6, True), Estimate(2e6, False)

    assert better(slow, fast) is better(fast, slow) is fast
    assert better(fast, bound) is better(bound, fast) is bound
    assert better(slow, None) is better(None, slow) is slow
    assert better(None, None) is None


def test_a_bound_below_the_median_of_the_others_is_not_announced() -> None:
    """It would count as a slow line; as unknown it counts as the median. An exact one is announced whatever it is."""
    assert announced(Estimate(2e6, False), []) == AT_LEAST + class_of(2e6)
    assert announced(Estimate(2e6, False), [0, class_of(1e6)]) == AT_LEAST + class_of(2e6)
    assert announced(Estimate(2e6, False), [class_of(5e5), class_of(8e6), AT_LEAST + class_of(8e6)]) == UNKNOWN
    assert announced(Estimate(2e6, False), [class_of(5e5), class_of(8e6)]) == UNKNOWN
    assert announced(Estimate(2e6, True), [class_of(8e6)] * 3) == class_of(2e6)
    assert announced(None, [7]) == UNKNOWN


@given(rate=st.floats(1e3, 1e10), is_exact=st.booleans(), others=st.lists(st.integers(0, 255), max_size=5))
def test_what_is_announced_is_a_class(rate: float, is_exact: bool, others: list[int]) -> None:
    """Whatever the others announce: none, or the class of the rate, marked as the bound that it is."""
    value = announced(Estimate(rate, is_exact), others)

    assert value == UNKNOWN or split(value) == (class_of(rate), not is_exact)
