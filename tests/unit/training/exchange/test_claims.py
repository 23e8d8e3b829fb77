"""What a member said of itself, and whether an answer contradicts it."""

from __future__ import annotations

import pytest

from tests.harness.builders.stores import IDS, term
from training.exchange import claims
from training.exchange.claims import SelfClaims
from training.exchange.terms import Term

B, C = IDS["b"], IDS["c"]


def claimed(number: int = 5) -> SelfClaims:
    found = SelfClaims()
    found.note(B, 0, term(number, "b"), 10.0)
    return found


@pytest.mark.parametrize(
    ("named", "contradicts"),
    [(None, True), (term(4, "c"), True), (term(5, "b"), False), (term(5, "c"), False), (term(6, "a"), False)],
)
def test_who_denies_what_it_claimed_contradicts_itself(named: Term | None, contradicts: bool) -> None:
    """Unless it names an owner under a term as high: then it has lost the shard since. Once for each claim."""
    found = claimed()
    assert found.contradicts(B, 0, named, 11.0) is contradicts
    assert not found.contradicts(B, 0, None, 11.0)


@pytest.mark.parametrize(("fence", "contradicts"), [(4, True), (5, True), (6, False)])
def test_who_has_seen_a_higher_term_may_have_forgotten_whose_it_was(fence: int, contradicts: bool) -> None:
    """Its owner was started again since."""
    assert claimed().contradicts(B, 0, None, 11.0, term(fence, "b")) is contradicts


def test_a_denial_of_something_else_is_none() -> None:
    """Of another shard, of another member, or in answer to a question from before the claim."""
    found = claimed()
    assert not found.contradicts(B, 1, None, 11.0)
    assert not found.contradicts(C, 0, None, 11.0)
    assert not found.contradicts(B, 0, None, 10.0)
    assert found.contradicts(B, 0, None, 11.0)


def test_the_highest_claim_counts_and_the_first_moment() -> None:
    """A member that claims all the time is not safe because its last claim is younger than the question."""
    found = claimed(7)
    found.note(B, 0, term(6, "b"), 12.0)
    assert found.contradicts(B, 0, term(6, "c"), 11.0)


def test_a_member_that_was_started_again_need_not_know_its_claims() -> None:
    """Those of others stay."""
    found = claimed()
    found.note(C, 0, term(6, "c"), 10.0)
    found.forget(B)
    assert not found.contradicts(B, 0, None, 11.0)
    assert found.contradicts(C, 0, None, 11.0)


def test_invented_claims_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a limit the oldest is forgotten."""
    monkeypatch.setattr(claims, "MAX_CLAIMS", 8)
    found = claimed()
    for shard in range(1, 20):
        found.note(C, shard, term(1, "c"), 11.0)
    assert len(found._claims) == 8
    assert not found.contradicts(B, 0, None, 12.0)
