"""Who is to blame for audits that failed: own evidence, complaints of several members, and pairs."""

from __future__ import annotations

import random

import pytest

from training.exchange.audit_records.outcomes import ACCUSERS, APART_S, MANY, OWN, WINDOW_S, AuditOutcomes

A, B, C, D, E = (letter.encode() * 20 for letter in "abcde")


def test_so_many_own_contradictions_leave_an_owner_out_and_no_fewer() -> None:
    """Those of one moment are one, and those of long ago are forgotten."""
    outcomes = AuditOutcomes()
    assert [outcomes.own(A, 10.0) for _ in range(5)] == [False] * 5
    found = [outcomes.own(A, 10.0 + APART_S * number) for number in range(1, OWN)]
    assert found == [False] * (OWN - 2) + [True]
    assert not outcomes.own(A, 100.0), "what it was left out for counts no more"

    slow = AuditOutcomes()
    assert not any(slow.own(A, WINDOW_S * number) for number in range(10))


def test_one_member_alone_has_no_owner_left_out() -> None:
    """However often it complains; a second member is needed, within the window."""
    outcomes = AuditOutcomes()
    assert not any(outcomes.complaint(A, B, float(at_s)) for at_s in range(200))
    assert not outcomes.complaint(A, C, 200.0 + WINDOW_S)
    assert outcomes.complaint(A, D, 201.0 + WINDOW_S)
    assert ACCUSERS == 2


def test_complaints_about_one_owner_do_not_count_against_another() -> None:
    outcomes = AuditOutcomes()
    assert not outcomes.complaint(A, C, 1.0)
    assert not outcomes.complaint(B, D, 2.0)
    assert outcomes.complaint(A, D, 3.0)


def test_who_fails_with_two_different_members_is_the_liar() -> None:
    """As an owner or as a backup; one counterpart tells nothing."""
    as_owner = AuditOutcomes()
    assert [as_owner.pair(A, B, 1.0), as_owner.pair(A, B, 2.0), as_owner.pair(A, C, 3.0)] == [None, None, A]
    as_backup = AuditOutcomes()
    assert [as_backup.pair(B, A, 1.0), as_backup.pair(C, A, 2.0)] == [None, A]
    mixed = AuditOutcomes()
    assert [mixed.pair(B, A, 1.0), mixed.pair(A, C, 2.0)] == [None, A]
    old = AuditOutcomes()
    assert [old.pair(A, B, 1.0), old.pair(A, C, 1.0 + WINDOW_S)] == [None, None]


def test_two_liars_are_not_told_from_their_victims() -> None:
    """In a chain of contradictions two members fail with two each: nobody is left out for it."""
    outcomes = AuditOutcomes()
    assert [outcomes.pair(A, B, 1.0), outcomes.pair(C, D, 2.0), outcomes.pair(B, C, 3.0)] == [None, None, None]


@pytest.mark.parametrize("seed", range(200))
def test_where_one_member_lies_no_honest_one_is_ever_left_out(seed: int) -> None:
    """Random failed audits, each with the liar in it, as owner, backup or the member that complains."""
    chance = random.Random(seed)
    members = [bytes([number]) * 20 for number in range(chance.randrange(3, 9))]
    liar, honest = members[0], members[1:]
    outcomes = AuditOutcomes()
    for step in range(300):
        now_s, other = step * chance.uniform(0.1, 2.0), chance.choice(honest)
        kind = chance.randrange(5)
        if kind == 0:
            assert outcomes.pair(liar, other, now_s) in (None, liar)
        elif kind == 1:
            assert outcomes.pair(other, liar, now_s) in (None, liar)
        elif kind == 2:
            assert not outcomes.complaint(other, liar, now_s), f"seed {seed}: one liar was believed"
        elif kind == 3:
            outcomes.verdict(other, liar, now_s, follows=chance.random() < 0.5)
        elif outcomes.complaint(liar, other, now_s):
            outcomes.settle(liar)
        condemned = [one for one in honest if outcomes.is_condemned(one, now_s, len(members) - 2)]
        assert condemned == [], f"seed {seed}: one liar was believed"


@pytest.mark.parametrize("seen", ["complaint", "owner", "backup", "own"])
def test_a_verdict_and_one_audit_that_failed_here_leave_a_member_out(seen: str) -> None:
    """Either alone does not, nor both from one member, nor one of long ago."""

    def note(outcomes: AuditOutcomes, now_s: float) -> None:
        if seen == "complaint":
            outcomes.complaint(A, C, now_s)
        elif seen == "own":
            outcomes.own(A, now_s)
        else:
            outcomes.pair(*((A, C) if seen == "owner" else (C, A)), now_s)

    outcomes = AuditOutcomes()
    note(outcomes, 1.0)
    assert not outcomes.is_condemned(A, 1.0, 8)
    outcomes.verdict(A, C, 2.0)
    assert outcomes.is_condemned(A, 2.0, 8) == (seen == "own"), "C says both"
    outcomes.verdict(A, D, 3.0, follows=True)
    assert outcomes.is_condemned(A, 3.0, 8) == (seen == "own"), "D says nothing of its own"
    outcomes.verdict(A, D, 3.0)
    assert outcomes.is_condemned(A, 3.0, 8)
    assert not outcomes.is_condemned(C, 3.0, 8)
    assert not outcomes.is_condemned(A, 3.0 + WINDOW_S, 8)
    outcomes.settle(A)
    assert not outcomes.is_condemned(A, 4.0, 8)


def test_many_that_follow_are_followed_but_two_words_of_a_larger_swarm_are_not() -> None:
    """All of the others are many in a small one; without a member that has found something itself nobody is."""
    outcomes = AuditOutcomes()
    for member in (B, C, D, E):
        outcomes.verdict(A, member, 1.0, follows=True)
    assert not outcomes.is_condemned(A, 1.0, 4)

    outcomes = AuditOutcomes()
    outcomes.verdict(A, B, 1.0)
    outcomes.verdict(A, C, 1.0, follows=True)
    assert [outcomes.is_condemned(A, 1.0, others) for others in (2, MANY, 100)] == [True, False, False]
    outcomes.verdict(A, D, 1.0, follows=True)
    assert [outcomes.is_condemned(A, 1.0, others) for others in (2, MANY, 100)] == [True, True, True]

    alone = AuditOutcomes()
    alone.verdict(A, B, 1.0)
    assert not alone.is_condemned(A, 1.0, 1), "one member has nobody left out, in a swarm of three too"


def test_a_member_that_is_left_out_begins_anew() -> None:
    """What was noted of it, with whomever, is settled."""
    outcomes = AuditOutcomes()
    outcomes.pair(A, B, 1.0)
    outcomes.complaint(A, C, 1.0)
    outcomes.complaint(D, A, 1.0)
    outcomes.own(A, 1.0)
    outcomes.settle(A)
    assert outcomes.pair(A, C, 2.0) is None
    assert not outcomes.complaint(A, D, 2.0)
    assert not outcomes.complaint(D, E, 2.0)
