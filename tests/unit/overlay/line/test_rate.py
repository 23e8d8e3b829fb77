"""The measured rate of a line: the largest delivery rate lately, from windows of time."""

from __future__ import annotations

import random

import pytest

from p2pnode.overlay.line.capacity import UNKNOWN, class_of, split
from p2pnode.overlay.line.rate import (
    IDLE_S,
    MIN_FULL_WINDOWS,
    MIN_WINDOWS,
    ROUND_S,
    ROUNDS,
    TOGETHER,
    TRIAL_BYTES,
    WINDOW_S,
    LineRate,
    MeasuredLine,
)

MBIT = 125_000.0


def send(rate: LineRate, bytes_per_s: float, seconds: float, *, is_busy: bool = True) -> None:
    for _ in range(round(seconds / WINDOW_S)):
        rate.window(WINDOW_S, round(bytes_per_s * WINDOW_S), is_busy=is_busy)


def test_a_rate_is_unknown_until_enough_was_measured() -> None:
    """Idle windows and too few busy ones show nothing; the third busy one does, also after a pause."""
    rate = LineRate()
    send(rate, 0.0, 10.0, is_busy=False)
    send(rate, 20 * MBIT, (MIN_WINDOWS - 1) * WINDOW_S)
    assert rate.bytes_per_s is None
    send(rate, 0.0, 60.0, is_busy=False)
    assert rate.bytes_per_s is None
    send(rate, 20 * MBIT, WINDOW_S)
    assert rate.bytes_per_s == pytest.approx(20 * MBIT)


def test_idle_time_and_slow_peers_do_not_lower_a_rate() -> None:
    """Of a push to fast peers and then to a slow one alone the fast part is the line's rate."""
    rate = LineRate()
    for _ in range(6):
        send(rate, 100 * MBIT, 1.0)
        send(rate, 5 * MBIT, 8.0)
        send(rate, 0.0, 20.0, is_busy=False)

    assert rate.bytes_per_s == pytest.approx(100 * MBIT)


def test_one_window_that_is_far_too_fast_does_not_count() -> None:
    """A single outlier in a round is not the second largest rate."""
    rate = LineRate()
    send(rate, 20 * MBIT, 2.0)
    rate.window(WINDOW_S, 50_000_000, is_busy=True)
    send(rate, 21 * MBIT, 2.0)

    assert rate.bytes_per_s == pytest.approx(21 * MBIT)


def test_a_slower_line_is_known_after_five_rounds_and_a_faster_one_at_once() -> None:
    """The largest of the last rounds counts, and a round that shows more."""
    rate = LineRate()
    for _ in range(8):
        send(rate, 100 * MBIT, ROUND_S)
    for _ in range(ROUNDS - 1):
        send(rate, 5 * MBIT, ROUND_S)
        assert rate.bytes_per_s == pytest.approx(100 * MBIT)
    send(rate, 5 * MBIT, ROUND_S)
    assert rate.bytes_per_s == pytest.approx(5 * MBIT, rel=1e-3)

    send(rate, 50 * MBIT, MIN_WINDOWS * WINDOW_S)
    assert rate.bytes_per_s == pytest.approx(50 * MBIT, rel=1e-3)


def test_a_faster_line_is_known_although_nothing_waits_any_more() -> None:
    """Pushes of two seconds raise a rate that was measured on a slower line, and never lower it."""
    rate = LineRate()
    send(rate, 5 * MBIT, 2.0)
    send(rate, 0.0, 2.0, is_busy=False)
    for _ in range(MIN_WINDOWS):
        send(rate, 40 * MBIT, 2 * TOGETHER * WINDOW_S, is_busy=False)
        send(rate, 1 * MBIT, IDLE_S + WINDOW_S, is_busy=False)

    assert rate.bytes_per_s == pytest.approx(40 * MBIT)


def test_acknowledgements_that_come_in_bunches_show_no_faster_line() -> None:
    """A second's bytes in one window, the download being full: the line has a quarter of that."""
    rate = LineRate()
    for _ in range(10):
        send(rate, 0.0, (TOGETHER - 1) * WINDOW_S, is_busy=False)
        send(rate, TOGETHER * 1 * MBIT, WINDOW_S, is_busy=False)

    assert rate.bytes_per_s == pytest.approx(1 * MBIT)


def test_a_noisy_line_is_measured_within_a_fifth() -> None:
    """Windows that waver by 15 % give at most that much more than the line has."""
    seed = 3
    print(f"seed {seed}")
    rng, rate = random.Random(seed), LineRate()
    for _ in range(200):
        rate.window(
            WINDOW_S * rng.uniform(0.9, 1.5), round(20 * MBIT * WINDOW_S * rng.uniform(0.85, 1.15)), is_busy=True
        )
    assert rate.bytes_per_s is not None
    assert 0.9 * 20 * MBIT < rate.bytes_per_s < 1.28 * 20 * MBIT


def test_a_line_that_is_down_keeps_its_rate() -> None:
    """Two minutes in which everything waits and nothing arrives is no measurement of the line."""
    rate = LineRate()
    send(rate, 20 * MBIT, 2.0)
    send(rate, 0.0, 120.0)

    assert rate.bytes_per_s == pytest.approx(20 * MBIT)


def test_a_window_without_a_length_is_ignored() -> None:
    """Two readings at one moment divide nothing by zero."""
    rate = LineRate()
    for _ in range(10):
        assert rate.window(0.0, 1000, is_busy=True) is False
    assert rate.bytes_per_s is None


def test_a_line_announces_its_class_after_two_rounds_of_sending() -> None:
    """Receiving changes no class; each round of sending counts once."""
    line = MeasuredLine()
    for _ in range(400):
        line.received(WINDOW_S, round(100 * MBIT * WINDOW_S), is_busy=True)
    assert (line.capacity, line.download.bytes_per_s) == (0, pytest.approx(100 * MBIT))

    for _ in range(2):
        assert line.capacity == 0
        for _ in range(round(ROUND_S / WINDOW_S)):
            line.sent(WINDOW_S, round(20 * MBIT * WINDOW_S), is_busy=True, is_full=True)
    assert line.capacity == class_of(20 * MBIT)
    assert line.upload.bytes_per_s == pytest.approx(20 * MBIT)


def test_a_line_that_waits_for_one_slow_peer_is_known_as_a_lower_bound_only() -> None:
    """What one peer takes is less than the line carries; the rate is known when two streams wait at once."""
    line = MeasuredLine()
    for _ in range(200):
        line.sent(WINDOW_S, round(5 * MBIT * WINDOW_S), is_busy=True, is_full=False)
    assert (line.upload_bytes_per_s, line.upload.bytes_per_s) == (None, pytest.approx(5 * MBIT))
    assert split(line.capacity) == (class_of(5 * MBIT), True)

    for _ in range(200):
        line.sent(WINDOW_S, round(20 * MBIT * WINDOW_S), is_busy=True, is_full=True)
    assert line.upload_bytes_per_s == pytest.approx(20 * MBIT)
    assert split(line.capacity) == (class_of(20 * MBIT), False)

    # Two slow peers, and a short burst to the others that shows what the line can do.
    for _ in range(5):
        for _ in range(40):
            line.sent(WINDOW_S, round(5 * MBIT * WINDOW_S), is_busy=True, is_full=True)
        for _ in range(MIN_WINDOWS):
            line.sent(WINDOW_S, round(20 * MBIT * WINDOW_S), is_busy=False, is_full=False)
    assert line.upload_bytes_per_s is None
    assert split(line.capacity) == (class_of(20 * MBIT), False)


def test_jitter_changes_the_rate_of_a_full_line_little() -> None:
    """A path that stalls for half a second now and then and delivers what has piled up at once: within a sixth."""
    seed = 8
    print(f"seed {seed}")
    rng, line = random.Random(seed), MeasuredLine()
    waiting = 0.0
    for _ in range(400):
        waiting += 20 * MBIT * WINDOW_S
        if rng.random() < 0.1:
            line.sent(WINDOW_S, 1, is_busy=True, is_full=True)  # stalled
            continue
        line.sent(WINDOW_S, round(waiting), is_busy=True, is_full=True)
        waiting = 0.0

    assert line.upload.bytes_per_s is not None
    assert line.upload.bytes_per_s > 1.9 * 20 * MBIT
    assert line.upload_bytes_per_s == pytest.approx(20 * MBIT, rel=1 / 6)


def test_a_line_that_was_full_once_is_no_lower_bound_in_the_rounds_after() -> None:
    """A slow node that pushes little fills its line for two seconds of a minute: with the next round of sending the
    rate that it showed is its class, and others stop counting it among the fast ones."""
    line, rate = MeasuredLine(), 300_000.0
    for _ in range(8):
        line.sent(WINDOW_S, round(rate * WINDOW_S), is_busy=True, is_full=True)
    for _ in range(2):
        for _ in range(8):
            line.sent(WINDOW_S, 0, is_busy=False, is_full=False)
        for _ in range(MIN_WINDOWS + 1):
            line.sent(WINDOW_S, round(0.9 * rate * WINDOW_S), is_busy=True, is_full=False)
    for _ in range(8):
        line.sent(WINDOW_S, 0, is_busy=False, is_full=False)

    assert line.upload_bytes_per_s == rate
    assert line.capacity == class_of(rate)


def test_a_first_estimate_is_announced_until_what_is_sent_shows_another_class() -> None:
    """The source says which one counts, each change is told once, and the rates themselves stay unmeasured."""
    line = MeasuredLine()
    told: list[tuple[int, str]] = []
    line.on_change(lambda: told.append((line.capacity, line.capacity_source)))
    assert line.capacity_source == ""
    slow, fast = class_of(5 * MBIT), class_of(100 * MBIT)

    assert line.begin(slow, "stored")
    assert not line.begin(fast, "stored")
    assert line.upload_bytes_per_s is None
    assert told == [(slow, "stored")]
    for _ in range(3):
        for _ in range(round(ROUND_S / WINDOW_S)):
            line.sent(WINDOW_S, round(100 * MBIT * WINDOW_S), is_busy=True, is_full=True)

    assert told == [(slow, "stored"), (fast, "transfers")]


def test_a_capacity_that_was_measured_is_of_the_transfers() -> None:
    """Without a first estimate, what was sent is the source."""
    line = MeasuredLine()
    for _ in range(3 * round(ROUND_S / WINDOW_S)):
        line.sent(WINDOW_S, round(100 * MBIT * WINDOW_S), is_busy=True, is_full=True)

    assert line.capacity == class_of(100 * MBIT)
    assert line.capacity_source == "transfers"


def tried(line: MeasuredLine, count: int, moved_bytes: int, *, behind: int = 0) -> None:
    """Windows of a trial, in which what had waited for so many peers was not all delivered."""
    for _ in range(count):
        line.tried(WINDOW_S, moved_bytes, is_behind=behind > 0, has_several=behind > 1)


def test_a_line_that_is_behind_in_a_trial_shows_its_class_without_confirmation() -> None:
    """Three windows are enough; what was sent before, and stalls, do not end the trial."""
    line = MeasuredLine()
    assert line.begin_trial()
    tried(line, 1, TRIAL_BYTES - 1)
    tried(line, MIN_WINDOWS - 1, round(2 * MBIT * WINDOW_S), behind=2)
    tried(line, 20, 0, behind=2)
    assert (line.capacity, line.is_on_trial) == (UNKNOWN, True)
    tried(line, 1, round(2 * MBIT * WINDOW_S), behind=3)

    assert (line.capacity, line.is_on_trial) == (class_of(2 * MBIT), False)
    assert line.capacity_source == "transfers"
    assert not line.begin_trial()


def test_a_trial_ends_where_a_line_keeps_up() -> None:
    """It was not behind in some windows after the first 256 KiB: no rate of it is known."""
    line = MeasuredLine()
    line.begin_trial()
    tried(line, 8, TRIAL_BYTES // 8 - 1)
    tried(line, MIN_WINDOWS, 1)
    assert line.is_on_trial
    tried(line, MIN_WINDOWS + 1, 10)

    assert (line.capacity, line.is_on_trial) == (UNKNOWN, False)


def test_a_line_that_was_behind_with_one_peer_stays_on_trial() -> None:
    """That peer may be the slow one: windows in which it keeps up say nothing of the line."""
    line = MeasuredLine()
    line.begin_trial()
    tried(line, 10, 1000, behind=1)
    tried(line, 100, TRIAL_BYTES)

    assert (line.capacity, line.is_on_trial) == (UNKNOWN, True)


def test_a_rate_that_is_measured_otherwise_ends_a_trial() -> None:
    """The rate of a full line counts, without its second round."""
    line = MeasuredLine()
    line.begin_trial()
    for _ in range(MIN_FULL_WINDOWS):
        line.sent(WINDOW_S, round(5 * MBIT * WINDOW_S), is_busy=True, is_full=True)
    assert line.is_on_trial
    tried(line, 1, 0)

    assert line.capacity == class_of(5 * MBIT)
