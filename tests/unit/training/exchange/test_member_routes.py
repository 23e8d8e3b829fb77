"""Which members are reached by way of others: when to look, what ends a detour, and what is remembered."""

from __future__ import annotations

from overlay.addresses import Address
from training.exchange.indirect import (
    CONFIRM_S,
    DOUBTED_LOOK_S,
    FIRST_LOOK_S,
    LONGEST_SEARCH_S,
    MAX_MEMBERS,
    SEARCH_S,
    UNREACHED_S,
    MemberRoutes,
)

B, C, D = b"b" * 20, b"c" * 20, b"d" * 20
AT = Address("10.0.0.2", 8468)


def failing(*, relay: bytes = b"") -> MemberRoutes:
    """Direct requests to node b fail since second 10; `relay` was found in second 12."""
    routes = MemberRoutes()
    routes.failed(B, AT, "refused the connection", 10.0)
    if relay:
        assert routes.found(B, relay, 12.0)
    return routes


def test_a_failure_leads_to_a_look_unless_the_member_answers() -> None:
    """After `FIRST_LOOK_S`: until then the failure detector suspects a member that was killed."""
    routes = failing()
    assert not routes.is_due(B, 10.0 + FIRST_LOOK_S - 0.1, is_doubted=False)
    assert routes.is_due(B, 10.0 + FIRST_LOOK_S, is_doubted=False)
    assert not routes.is_due(C, 99.0, is_doubted=False)
    assert not routes.reached(B)
    assert not routes.is_due(B, 99.0, is_doubted=False)
    assert not routes


def test_a_member_that_is_held_for_dead_is_looked_for_later() -> None:
    """Others have taken its shards by then, if it is dead. One that is reached already is confirmed all the same."""
    routes = failing()
    assert not routes.is_due(B, 10.0 + DOUBTED_LOOK_S - 0.1, is_doubted=True)
    assert routes.is_due(B, 10.0 + DOUBTED_LOOK_S, is_doubted=True)
    assert failing(relay=C).is_due(B, 12.0 + CONFIRM_S, is_doubted=True)


def test_a_relay_is_used_until_it_fails_or_the_member_answers_directly() -> None:
    """Failures of another relay, from before, change nothing."""
    routes = failing(relay=C)
    assert (routes.relay(B), routes.is_unreached(B, 12.0), routes.is_unreached(C, 12.0)) == (C, True, False)
    routes.failed(B, AT, "was silent", 13.0, D)
    assert routes.relay(B) == C
    routes.failed(B, AT, "was silent", 13.0, C)
    assert routes.relay(B) == b""
    assert routes.is_due(B, 13.0, is_doubted=False)
    assert routes.rows()[B].reason == "refused the connection"
    assert routes.found(B, D, 14.0)
    assert routes.reached(B)
    assert routes.relay(B) == b""


def test_a_relay_is_confirmed_and_told_apart_from_a_new_one() -> None:
    """Every `CONFIRM_S`, so that a dead owner is not held for alive."""
    routes = failing(relay=C)
    assert not routes.is_due(B, 12.0 + CONFIRM_S - 0.1, is_doubted=False)
    assert not routes.found(B, C, 20.0)
    assert not routes.is_due(B, 20.0 + CONFIRM_S - 0.1, is_doubted=False)
    assert routes.found(B, D, 30.0)
    assert not routes.found(B, b"", 40.0)
    assert routes.relay(B) == b""


def test_searches_in_vain_become_rare() -> None:
    """Each pause is twice as long as the one before, up to `LONGEST_SEARCH_S`."""
    routes, now, pauses = failing(), 20.0, []
    for _ in range(8):
        routes.found(B, b"", now)
        pause_s = next(step / 10 for step in range(10000) if routes.is_due(B, now + step / 10, is_doubted=False))
        pauses.append(pause_s)
        now += pause_s
    assert pauses[:2] == [SEARCH_S, 2 * SEARCH_S]
    assert pauses[-1] == LONGEST_SEARCH_S


def test_what_a_dead_member_relayed_is_looked_for_at_once() -> None:
    """So is the dead member itself, for its death may be a hole."""
    for dead in (B, C):
        routes = failing(relay=C)
        routes.died(dead)
        assert routes.relay(B) == b""
        assert routes.is_due(B, 12.0, is_doubted=False)
    routes = failing(relay=C)
    routes.died(D)
    assert routes.relay(B) == C


def test_the_last_reason_counts_and_the_first_moment() -> None:
    """For `/status`."""
    routes = failing()
    routes.failed(B, Address("10.0.0.3", 1), "cannot be reached", 15.0)
    (route,) = routes.rows().values()
    assert (route.since_s, route.reason, route.address) == (10.0, "cannot be reached", Address("10.0.0.3", 1))


def test_memory_is_bounded() -> None:
    """The member that failed first is forgotten."""
    routes = MemberRoutes()
    for number in range(MAX_MEMBERS + 5):
        routes.failed(number.to_bytes(20, "big"), AT, "refused", float(number))
    assert len(routes.rows()) == MAX_MEMBERS
    assert not routes.is_unreached((0).to_bytes(20, "big"), 1e6)


def test_a_request_that_fails_once_makes_a_member_no_stranger() -> None:
    """A question may wait in the queue of a slow line: only what fails for long is no candidate any more."""
    routes = failing()

    assert not routes.is_unreached(B, 10.0 + UNREACHED_S - 0.1)
    assert routes.is_unreached(B, 10.0 + UNREACHED_S)


def test_a_take_over_waits_for_one_look() -> None:
    """Those that follow it within `DOUBTED_LOOK_S` do not look again: the next attempt would come too late."""
    routes = failing()
    assert not routes.was_looked_for(B, 12.0)
    routes.found(B, b"", 12.0)
    assert routes.was_looked_for(B, 12.0 + DOUBTED_LOOK_S - 0.1)
    assert not routes.was_looked_for(B, 12.0 + DOUBTED_LOOK_S)
