"""Adaptive timeouts: from measured response times, between floor and ceiling, per peer and kind."""

from __future__ import annotations

import pytest

from training.exchange.rpc import (
    DEVIATIONS,
    FORWARD,
    MAX_BACKOFF,
    MAX_KEYS,
    MAX_MEASUREMENTS,
    MIN_MEASUREMENTS,
    REQUEST,
    AdaptiveTimeouts,
)

PEER, OTHER, STRANGER = b"p" * 20, b"o" * 20, b"s" * 20


def measured(*seconds: float, peer: bytes = PEER) -> AdaptiveTimeouts:
    timeouts = AdaptiveTimeouts()
    for one in seconds:
        timeouts.on_response("push", peer, one)
    return timeouts


def test_before_anything_is_measured_the_first_values_hold() -> None:
    """Also while there are too few answers for an estimate."""
    assert AdaptiveTimeouts().timeout_s("push", PEER) == REQUEST.first_s
    assert AdaptiveTimeouts().timeout_s("forward", PEER) == FORWARD.first_s
    assert measured(*[2.9] * (MIN_MEASUREMENTS - 1)).timeout_s("push", PEER) == REQUEST.first_s


def test_the_median_and_four_deviations() -> None:
    """One slow answer among fast ones does not change the timeout; a wide distribution does."""
    seconds = [2.0, 2.1, 2.2, 2.3, 9.0]

    assert measured(*seconds).timeout_s("push", PEER) == pytest.approx(2.2 + DEVIATIONS * 0.1)


def test_times_below_the_floor_may_scatter_above_it() -> None:
    """The estimate is that of its formula wherever the times lie, also where each of them is below the floor."""
    seconds = [0.1, 1.9, 0.2, 1.8, 1.0]

    assert measured(*seconds).timeout_s("push", PEER) == pytest.approx(1.0 + DEVIATIONS * 0.8)


def test_quick_answers_meet_the_floor_and_slow_ones_the_ceiling() -> None:
    """A machine that stalls for a second is waited for, and no first silence lasts past the detection bound."""
    assert measured(*[0.001] * 8).timeout_s("push", PEER) == REQUEST.floor_s
    assert measured(*[4.5, 0.0] * 4).timeout_s("push", PEER) == REQUEST.ceiling_s


def test_an_owner_gives_its_backup_up_before_its_callers_give_up_the_owner() -> None:
    """For all measurements the longest forward timeout is below the shortest push timeout."""
    assert FORWARD.ceiling_s < REQUEST.floor_s <= REQUEST.first_s <= REQUEST.ceiling_s
    assert FORWARD.floor_s <= FORWARD.first_s <= FORWARD.ceiling_s


def test_old_answers_are_forgotten() -> None:
    """A link that has become fast again gets its short timeout again."""
    timeouts = measured(*[4.0] * MAX_MEASUREMENTS)
    before = timeouts.timeout_s("push", PEER)
    for _ in range(MAX_MEASUREMENTS):
        timeouts.on_response("push", PEER, 0.01)

    assert (before, timeouts.timeout_s("push", PEER)) == (4.0, REQUEST.floor_s)


def test_one_slow_peer_does_not_delay_requests_to_another() -> None:
    """Each peer has its own; for an unknown peer the median of all counts; other kinds are separate."""
    timeouts = measured(*[4.0] * 8)
    for _ in range(12):
        timeouts.on_response("push", OTHER, 0.01)

    assert timeouts.timeout_s("push", PEER) == 4.0
    assert timeouts.timeout_s("push", OTHER) == REQUEST.floor_s
    assert timeouts.timeout_s("push", STRANGER) == REQUEST.floor_s
    assert timeouts.timeout_s("pull", PEER) == REQUEST.first_s


def test_silence_gives_more_time_until_an_answer_comes() -> None:
    """Step by step, beyond the ceiling, for that peer alone: it may have become slower than any measurement. One that
    is suspected is given no more than the ceiling."""
    timeouts = measured(*[0.01] * 8)
    steps = []
    for _ in range(4):
        timeouts.on_timeout("push", PEER)
        steps.append((timeouts.timeout_s("push", PEER), timeouts.timeout_s("push", PEER, is_suspect=True)))
    for _ in range(20):
        timeouts.on_timeout("push", PEER)
    most_s = timeouts.timeout_s("push", PEER)
    timeouts.on_response("push", PEER, 2.5)

    assert steps == [(3.0, 3.0), (4.5, 4.5), (6.75, 4.5), (10.125, 4.5)]
    assert most_s == MAX_BACKOFF * REQUEST.floor_s
    assert timeouts.timeout_s("push", PEER) == REQUEST.floor_s
    assert timeouts.timeout_s("push", OTHER) == REQUEST.floor_s


def test_a_peer_that_answered_late_is_given_as_long_again() -> None:
    """An answer that came after the ceiling, on an attempt that waited longer, is expected again; a suspect is not
    waited for, and neither is a peer that has been quick since."""
    timeouts = AdaptiveTimeouts()
    timeouts.on_response("forward", PEER, 3.0)
    assert timeouts.timeout_s("forward", PEER) == FORWARD.first_s, "once is chance"
    timeouts.on_response("forward", PEER, 60.0)
    assert timeouts.timeout_s("forward", PEER) == pytest.approx(1.5 * 3.0)
    assert timeouts.timeout_s("forward", PEER, is_suspect=True) == FORWARD.ceiling_s
    assert timeouts.timeout_s("forward", OTHER) == FORWARD.first_s
    for _ in range(MAX_MEASUREMENTS):
        timeouts.on_response("forward", PEER, 0.1)
    assert timeouts.timeout_s("forward", PEER) == FORWARD.floor_s


def test_what_is_remembered_is_bounded() -> None:
    """Beyond the limit the peer with the oldest answer is dropped."""
    timeouts = AdaptiveTimeouts()
    for number in range(MAX_KEYS + 50):
        peer = number.to_bytes(20, "big")
        timeouts.on_response("push", peer, 1.0)
        timeouts.on_timeout("pull", peer)

    assert len(timeouts._measured) == MAX_KEYS
    assert len(timeouts._backed_off) == MAX_KEYS
