"""Ranks of copies: which one a take-over continues from."""

from __future__ import annotations

import pytest

from tests.harness.builders.stores import term
from training.exchange.ownership_messages import CopyStatus
from training.exchange.store.copies import rank_copy
from training.exchange.terms import ZERO_TERM, Role, Term


def copy(role: Role, held: Term, version: int = 0, *, fence: Term = ZERO_TERM, is_stored: bool = False) -> CopyStatus:
    return CopyStatus(0, role, *held, version, *fence, 0, is_stored)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (copy("replica", term(3, "a"), 1), copy("owner", term(2, "b"), 9)),
        (copy("owner", term(2, "a")), copy("backup", term(2, "a"), 9)),
        (copy("backup", term(2, "a")), copy("learner", term(2, "a"), 9)),
        (copy("learner", term(2, "a")), copy("replica", term(2, "a"), 9)),
        (copy("replica", term(2, "a"), 5), copy("replica", term(2, "a"), 4)),
        (copy("replica", term(2, "a"), 5, is_stored=True), copy("replica", term(2, "a"), 5)),
        (copy("learner", term(2, "a"), fence=term(4, "a")), copy("learner", term(2, "a"), 9, fence=term(3, "a"))),
        # Two sides of a split: the history decides, not the node id.
        (copy("backup", term(2, "a")), copy("replica", term(2, "b"), 9)),
    ],
)
def test_the_better_copy_ranks_higher(better: CopyStatus, worse: CopyStatus) -> None:
    """Terms come first, then roles, promises and versions; a state from disk ranks above a bare value."""
    assert rank_copy(better) > rank_copy(worse)


def test_a_learner_whose_promised_term_is_in_use_is_the_backup() -> None:
    """Its owner acknowledged deltas under that term: they may be in this copy only."""
    learner = copy("learner", term(2, "a"), fence=term(3, "a"))
    assert rank_copy(learner, {term(3, "a"): None}) == rank_copy(copy("backup", term(3, "a")))
    assert rank_copy(learner, {term(4, "a"): None}) < rank_copy(copy("backup", term(2, "a")))


def test_of_two_sides_of_a_split_the_history_ranks_above_a_replica() -> None:
    """Under one number a replica cannot be later than the state, whatever the ids; under a later number it may be."""
    whole, beside = copy("backup", term(7, "a"), 41), copy("replica", term(7, "c"), 41)
    after = copy("replica", term(8, "b"), 41)

    assert rank_copy(beside) < rank_copy(whole) < rank_copy(after)
    assert not rank_copy(after).has_history
