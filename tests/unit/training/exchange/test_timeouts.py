"""Deadlines: from what was measured, between floor and ceiling, per peer and kind."""

from __future__ import annotations

import pytest

from training.exchange.timeouts import (
    DEVIATIONS,
    FORWARD,
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
    """Also while there are too few answers to say anything."""
    assert AdaptiveTimeouts().timeout_s("push", PEER) == REQUEST.first_s
    assert AdaptiveTimeouts().timeout_s("forward", PEER) == FORWARD.first_s
    assert measured(*[2.9] * (MIN_MEASUREMENTS - 1)).timeout_s("push", PEER) == REQUEST.first_s


def test_the_median_and_four_deviations() -> None:
    """One long answer among short ones does not move it; a spread does."""
    seconds = [2.0, 2.1, 2.2, 2.3, 9.0]

    assert measured(*seconds).timeout_s("push", PEER) == pytest.approx(2.2 + DEVIATIONS * 0.1)


def test_quick_answers_meet_the_floor_and_slow_ones_the_ceiling() -> None:
    """A machine that stalls for a second is not given up, and nobody waits past the detection bound."""
    assert measured(*[0.001] * 8).timeout_s("push", PEER) == REQUEST.floor_s
    assert measured(*[60.0] * 8).timeout_s("push", PEER) == REQUEST.ceiling_s


def test_an_owner_gives_its_backup_up_before_its_callers_give_up_the_owner() -> None:
    """Whatever was measured: the longest forward ends before the shortest push."""
    assert FORWARD.ceiling_s < REQUEST.floor_s <= REQUEST.first_s <= REQUEST.ceiling_s
    assert FORWARD.floor_s <= FORWARD.first_s <= FORWARD.ceiling_s


def test_old_answers_are_forgotten() -> None:
    """A line that has become fast again is given its short deadline again."""
    timeouts = measured(*[4.0] * MAX_MEASUREMENTS)
    before = timeouts.timeout_s("push", PEER)
    for _ in range(MAX_MEASUREMENTS):
        timeouts.on_response("push", PEER, 0.01)

    assert (before, timeouts.timeout_s("push", PEER)) == (4.0, REQUEST.floor_s)


def test_one_slow_peer_makes_nobody_wait_for_another() -> None:
    """Each has its own; for a stranger the median of all counts; another kind is not touched."""
    timeouts = measured(*[4.0] * 8)
    for _ in range(12):
        timeouts.on_response("push", OTHER, 0.01)

    assert timeouts.timeout_s("push", PEER) == 4.0
    assert timeouts.timeout_s("push", OTHER) == REQUEST.floor_s
    assert timeouts.timeout_s("push", STRANGER) == REQUEST.floor_s
    assert timeouts.timeout_s("pull", PEER) == REQUEST.first_s


def test_silence_gives_more_time_until_an_answer_comes() -> None:
    """Step by step up to the ceiling, for that peer alone: an answer slower than any measured can still be heard."""
    timeouts = measured(*[0.01] * 8)
    steps = []
    for _ in range(4):
        timeouts.on_timeout("push", PEER)
        steps.append(timeouts.timeout_s("push", PEER))
    timeouts.on_response("push", PEER, 2.5)

    assert steps == [3.0, 4.5, 4.5, 4.5]
    assert timeouts.timeout_s("push", PEER) == REQUEST.floor_s
    assert timeouts.timeout_s("push", OTHER) == REQUEST.floor_s


def test_what_is_remembered_is_bounded() -> None:
    """More peers than a node can know: the one longest without an answer goes."""
    timeouts = AdaptiveTimeouts()
    for number in range(MAX_KEYS + 50):
        peer = number.to_bytes(20, "big")
        timeouts.on_response("push", peer, 1.0)
        timeouts.on_timeout("pull", peer)

    assert len(timeouts._measured) == MAX_KEYS
    assert len(timeouts._backed_off) == MAX_KEYS
