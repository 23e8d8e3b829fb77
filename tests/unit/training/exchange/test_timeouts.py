"""Adaptive timeouts: from measured response times, between floor and ceiling, per peer and kind."""

from __future__ import annotations

from p2pnode.training.exchange.timeouts import BACKOFF, FORWARD, MAX_BACKOFF, MAX_KEYS, REQUEST, AdaptiveTimeouts

PEER, OTHER = b"p" * 20, b"o" * 20


def measured(*seconds: float) -> AdaptiveTimeouts:
    timeouts = AdaptiveTimeouts()
    for one in seconds:
        timeouts.on_response("push", PEER, one)
    return timeouts


def test_each_peer_has_a_timeout_for_each_kind() -> None:
    """Before anything is measured the first values hold; one slow peer does not delay requests to another."""
    timeouts = measured(*[4.0] * 8)
    assert timeouts.timeout_s("push", PEER) == REQUEST.ceiling_s
    assert timeouts.timeout_s("push", OTHER) == timeouts.timeout_s("pull", PEER) == REQUEST.first_s
    assert timeouts.timeout_s("forward", PEER) == FORWARD.first_s


def test_quick_answers_meet_the_floor_and_slow_ones_the_ceiling() -> None:
    """A machine that stalls for a second is waited for, and no first silence lasts past the detection bound. A link
    that has become fast again gets its short timeout again."""
    assert measured(*[0.001] * 8).timeout_s("push", PEER) == REQUEST.floor_s
    assert measured(*[9.0, 0.0] * 4).timeout_s("push", PEER) == REQUEST.ceiling_s
    assert measured(*[4.0] * 16, *[0.01] * 32).timeout_s("push", PEER) == REQUEST.floor_s


def test_an_owner_gives_its_backup_up_before_its_callers_give_up_the_owner() -> None:
    """For all measurements the longest forward timeout is below the shortest push timeout."""
    assert FORWARD.ceiling_s < REQUEST.floor_s <= REQUEST.first_s <= REQUEST.ceiling_s
    assert FORWARD.floor_s <= FORWARD.first_s <= FORWARD.ceiling_s


def test_silence_gives_more_time() -> None:
    """Step by step, beyond the ceiling, for that peer alone: it may have become slower than any measurement. One that
    is suspected is given no more than the ceiling."""
    timeouts = measured(*[0.01] * 8)
    steps = []
    for _ in range(4):
        timeouts.on_timeout("push", PEER)
        steps.append((timeouts.timeout_s("push", PEER), timeouts.timeout_s("push", PEER, is_suspect=True)))
    for _ in range(20):
        timeouts.on_timeout("push", PEER)

    assert steps == [(3.0, 3.0), (4.5, 4.5), (6.75, 4.5), (10.125, 4.5)]
    assert timeouts.timeout_s("push", PEER) == MAX_BACKOFF * REQUEST.floor_s
    assert timeouts.timeout_s("push", OTHER) == REQUEST.first_s


def test_a_peer_that_answers_late_is_given_as_long_again() -> None:
    """Or every other request to it would fail. A prompt answer takes one step back."""
    timeouts = AdaptiveTimeouts()
    for _ in range(4):
        timeouts.on_timeout("forward", PEER)
    for _ in range(8):
        timeouts.on_response("forward", PEER, 6.0)
    assert timeouts.timeout_s("forward", PEER) == FORWARD.ceiling_s * BACKOFF**4
    for _ in range(64):
        timeouts.on_response("forward", PEER, 0.1)
    assert timeouts.timeout_s("forward", PEER) == FORWARD.floor_s


def test_what_is_remembered_is_bounded() -> None:
    """Beyond the limit the peer that was asked longest ago is dropped."""
    timeouts = AdaptiveTimeouts()
    for number in range(MAX_KEYS + 50):
        timeouts.on_timeout("push", number.to_bytes(20, "big"))

    assert len(timeouts._times) == MAX_KEYS
    assert timeouts.timeout_s("push", (0).to_bytes(20, "big")) == REQUEST.first_s
