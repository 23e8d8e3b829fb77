"""Whom a node does without for a while, although they live, for how long, and by way of whom it reaches them."""

from __future__ import annotations

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peers import Contact
from p2pnode.training.exchange.peer_score import (
    APART_S,
    FIRST_LOOK_S,
    IGNORED_S,
    LOOK_S,
    LOOKED_S,
    MAX_MEMBERS,
    NONSENSE,
    NONSENSE_S,
    UNANSWERED,
    UNREACHED_S,
    PeerScore,
)
from tests.harness.builders.stores import IDS, contact
from tests.harness.environment.simulated import ListLog, Record

A, B, C, D = (IDS[name] for name in "abcd")


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return self.now_s


class Scored:
    """A score, and what is done to it at its clock's time."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.records: list[Record] = []
        self.score = PeerScore(A, self.clock, ListLog(self.records, "", self.clock))

    def silence(self, every_s: float = UNREACHED_S / 2, times: int = UNANSWERED) -> None:
        """B leaves so many requests unanswered."""
        for _ in range(times):
            self.score.failed(contact("b"), "did not answer")
            self.clock.now_s += every_s

    def nonsense(self, times: int = NONSENSE, apart_s: float = APART_S) -> None:
        for _ in range(times):
            self.score.nonsense(B, "value")
            self.clock.now_s += apart_s

    @property
    def events(self) -> list[tuple[str, str]]:
        """Events and reasons, but for what is told each time."""
        told = [one for one in self.records if one.event != "nonsense_received"]
        return [(one.event, one.fields.get("reason", "")) for one in told]


# -- silence ----------------------------------------------------------------------------------------------------------


def test_a_member_that_answers_nothing_while_others_do_is_silent_until_it_answers() -> None:
    """It is told once. It is not ignored: its next answer counts, and its next silence begins anew."""
    one = Scored()
    one.score.answered(C)
    one.silence()
    one.score.failed(contact("b"), "did not answer")
    assert one.score.is_silent(B)
    assert one.score.is_unreached(B)
    assert not one.score.is_silent(C)
    assert not one.score.is_quarantined(B)
    assert one.score.quarantined() == [(B, "silent", 0.0)]
    assert one.events == [("member_quarantined", "silent")]
    one.score.answered(B)
    one.score.failed(contact("b"), "did not answer")
    assert not one.score.is_silent(B)
    assert not one.score.is_unreached(B)


def test_a_node_that_nobody_answers_leaves_nobody_out() -> None:
    """Then it is its own line that fails; what others answered before does not count."""
    one = Scored()
    one.score.answered(C)
    one.clock.now_s += 0.1
    one.silence(times=20)
    assert not one.score.is_silent(B)
    one.score.answered(C)
    one.score.answered(D)
    assert one.score.is_silent(B)


@pytest.mark.parametrize(("every_s", "times"), [(UNREACHED_S, UNANSWERED - 1), (UNREACHED_S / 10, UNANSWERED)])
def test_a_few_lost_answers_or_a_short_silence_are_none(every_s: float, times: int) -> None:
    """Both the number of requests and the time must be long enough."""
    one = Scored()
    one.score.answered(C)
    one.silence(every_s, times)
    assert not one.score.is_silent(B)


def test_a_request_that_fails_once_makes_a_member_no_stranger() -> None:
    """A question may wait in the queue of a slow line: only what fails for long is no candidate any more."""
    one = Scored()
    one.silence(UNREACHED_S - 0.1, 1)
    assert not one.score.is_unreached(B)
    assert one.score.failed_within(B, UNREACHED_S)
    one.clock.now_s += 0.2
    assert one.score.is_unreached(B)
    assert not one.score.failed_within(B, UNREACHED_S)


def test_what_a_member_failed_to_answer_before_it_was_started_again_does_not_count() -> None:
    """Nor when it is declared dead: then it is asked nothing."""
    one = Scored()
    one.score.answered(C)
    one.silence()
    one.score.forget(B)
    assert not one.score.unreached()
    assert not one.score.is_silent(B)


# -- nonsense ---------------------------------------------------------------------------------------------------------


def test_so_much_nonsense_has_a_member_ignored_for_a_minute() -> None:
    """What comes at one moment counts once, and what is long ago not at all."""
    one = Scored()
    one.nonsense(100, apart_s=0.0)
    one.clock.now_s += NONSENSE_S
    one.nonsense(3 * NONSENSE, apart_s=NONSENSE_S / (NONSENSE - 1))
    one.clock.now_s += NONSENSE_S
    one.nonsense(NONSENSE - 1)
    assert not one.score.is_quarantined(B)
    assert one.score.quarantined() == one.events == []
    one.nonsense(1, apart_s=0.0)
    assert one.score.is_quarantined(B)
    assert not one.score.is_silent(B)
    assert one.score.quarantined() == [(B, "nonsense", IGNORED_S)]
    assert one.events == [("member_quarantined", "nonsense")]
    one.clock.now_s += IGNORED_S
    assert not one.score.is_quarantined(B)
    assert one.score.quarantined() == []
    one.nonsense()
    assert one.score.is_quarantined(B)


def test_what_this_node_hands_on_itself_is_no_ones_nonsense() -> None:
    """Its own state may be broken: it is not to ignore itself."""
    one = Scored()
    for _ in range(NONSENSE):
        one.score.nonsense(A, "state")
        one.clock.now_s += APART_S
    assert not one.score.is_quarantined(A)
    assert one.records == []


def test_a_foreign_node_is_ignored_whenever_it_is_met() -> None:
    """While it is ignored more of its requests change nothing."""
    one = Scored()
    for _ in range(2):
        one.score.foreign(B)
    assert one.events == [("member_quarantined", "foreign")]
    assert one.score.is_quarantined(B)
    one.clock.now_s += IGNORED_S
    assert not one.score.is_quarantined(B)
    one.score.foreign(B)
    assert one.score.is_quarantined(B)


def test_invented_members_take_no_memory() -> None:
    """Beyond a limit the one that was noted first is forgotten."""
    score = Scored().score
    for number in range(MAX_MEMBERS + 5):
        node = number.to_bytes(20, "big")
        score.nonsense(node, "value")
        score.foreign(node)
        score.failed(Contact(node, Address("10.0.0.1", 1)), "refused")
    assert len(score._nonsense_s) == len(score._ignored) == len(score.unreached()) == MAX_MEMBERS


# -- ways to them -----------------------------------------------------------------------------------------------------


def reached_by(relay: bytes) -> Scored:
    """Direct requests to B have failed, and this member was found to reach it."""
    one = Scored()
    one.score.answered(C)
    one.silence()
    one.score.looked_for(B, relay)
    return one


def test_a_member_is_looked_for_soon_and_again_and_again() -> None:
    """Until it answers. After a look no take-over waits for another one, for a while."""
    one = Scored()
    one.silence(FIRST_LOOK_S / 2, 1)
    assert one.score.to_look_for() == {}
    one.clock.now_s += FIRST_LOOK_S
    assert one.score.to_look_for() == {B: contact("b").address}
    assert not one.score.was_looked_for(B)
    one.score.looked_for(B, b"")
    assert one.score.to_look_for() == {}
    one.clock.now_s += LOOK_S
    assert list(one.score.to_look_for()) == [B]
    assert one.score.was_looked_for(B)
    one.clock.now_s += LOOKED_S - LOOK_S
    assert not one.score.was_looked_for(B)
    one.score.answered(B)
    one.clock.now_s += LOOK_S
    assert one.score.to_look_for() == {}


def test_a_member_that_another_one_reaches_is_not_silent() -> None:
    """It is no candidate. Where the relay fails it is silent again, and looked for at once; failures of another relay,
    from before, change nothing."""
    one = reached_by(C)
    assert (one.score.relay(B), one.score.is_unreached(B), one.score.is_silent(B)) == (C, True, False)
    assert not one.score.failed_within(B, 100.0)
    one.score.answered(B, by_relay=True)
    one.score.failed(contact("b"), "was silent", D)
    assert one.score.relay(B) == C
    one.score.failed(contact("b"), "was silent", C)
    assert one.score.relay(B) == b""
    assert one.score.is_silent(B)
    assert list(one.score.to_look_for()) == [B]


def test_a_new_relay_and_a_direct_answer_are_told() -> None:
    """A relay that is confirmed is not."""
    one = reached_by(C)
    for relay in (C, D):
        one.score.looked_for(B, relay)
    one.score.answered(B)
    assert one.score.relay(B) == b""
    found = ("route_found", "did not answer")
    assert one.events == [("member_quarantined", "silent"), found, found, ("route_direct", "")]


def test_a_dead_member_relays_nothing() -> None:
    """What it relayed is looked for at once."""
    one = reached_by(C)
    one.score.forget(D)
    assert one.score.relay(B) == C
    one.score.forget(C)
    assert one.score.relay(B) == b""
    assert list(one.score.to_look_for()) == [B]


def test_the_last_reason_counts_and_the_first_moment() -> None:
    """For `/status`."""
    one = Scored()
    one.silence()
    one.score.failed(Contact(B, Address("10.0.0.3", 1)), "cannot be reached")
    (found,) = one.score.unreached().values()
    assert (found.since_s, found.reason, found.address) == (1000.0, "cannot be reached", Address("10.0.0.3", 1))
