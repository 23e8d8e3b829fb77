"""Ranks of copies: which one a take-over continues from.

The status of a copy that a survey reports, for every role.

States built from a replica or from disk, for a take-over without a better copy.
"""

from __future__ import annotations

import numpy as np
import pytest

from p2pnode.training.exchange.ownership_messages import CopyStatus
from p2pnode.training.exchange.store.records import StoredState
from p2pnode.training.exchange.store.replica import Replica, copy_status, rank_copy, replica_copy, replica_state
from p2pnode.training.exchange.terms import ZERO_TERM, Role, Term
from p2pnode.training.shards.outer_rule import Rule
from tests.harness.builders.stores import BOUNDS, IDS, contact, delta, store_of, term, zeros


def copy(role: Role, held: Term, version: int = 0, *, fence: Term = ZERO_TERM, is_stored: bool = False) -> CopyStatus:
    return CopyStatus(0, role, held, version, fence, 0, is_stored)


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


def test_the_status_of_every_role() -> None:
    """Owner, backup, learner, replica, none; a learner without its state offers its replica."""
    store = store_of("b")
    mark = (term(1, "d"), 9)
    fence = (0, b"")
    assert copy_status(store, 0, None, 5) == CopyStatus(0, "none", ZERO_TERM, 0, fence, 5)
    assert copy_status(store, 0, mark, 5) == CopyStatus(0, "replica", term(1, "d"), 9, fence, 5)

    store.begin_catch_up(0, term(2, "a"), contact("a"))
    assert copy_status(store, 0, mark, 5) == CopyStatus(0, "replica", term(1, "d"), 9, term(2, "a"), 5)

    store.take_state(0, term(3, "a"), contact("a"), zeros(store))
    learner = copy_status(store, 0, mark, 5)
    assert (learner.role, learner.term, learner.version) == ("learner", term(2, "a"), 0)

    store.accept_forward(0, term(3, "a"), delta(1), 0, IDS["a"])
    assert copy_status(store, 0, mark, 5) == CopyStatus(0, "backup", term(3, "a"), 1, term(3, "a"), 5)

    state = store.backed[0].state
    assert state is not None
    store.own(0, state, term(4, "b"), contact("b"), 0.0, by_handover=False)
    store.ownership.raise_fence(0, term(6, "c"))
    status = copy_status(store, 0, mark, 5)
    assert status == CopyStatus(0, "owner", term(4, "b"), 1, term(6, "c"), 5)
    assert (status.term, status.fence) == (term(4, "b"), term(6, "c"))


SUM = Rule(outer_lr=1.0, outer_momentum=0.0)


def replica_of(value: float = 3.0) -> Replica:
    return Replica(np.full(BOUNDS[-1][1], value, np.float32), BOUNDS)


def test_a_replica_becomes_the_state_of_a_new_era() -> None:
    """Value and version are the replica's; the era begins at this node's step, and is that of its term."""
    store, replica = store_of("a"), replica_of()
    replica.set_version(1, term(4, "b"), 17)

    copied, state = replica_copy(store, replica, 12, 1) or (None, None)

    assert state is not None
    assert (copied, state.version, state.era_step, state.era_term) == (term(4, "b"), 17, 12, term(4, "b"))
    assert state.value.tolist() == [3.0] * 4
    replica.vector[:] = 0.0
    assert state.value.tolist() == [3.0] * 4


def test_an_era_is_never_zero() -> None:
    """Zero means that a state has the whole history."""
    replica = replica_of()
    replica.set_version(0, term(1, "b"), 1)

    assert replica_state(store_of("a"), replica, 0, 0).era_step == 1


def test_a_shard_that_was_never_pulled_has_no_copy() -> None:
    """The vector's initial values are no replica."""
    assert replica_copy(store_of("a"), replica_of(), 5, 0) is None


def test_a_state_from_disk_is_preferred_unless_the_replica_is_newer() -> None:
    """It has identities; its era is the next one, so that a copy with the whole history replaces it."""
    store, replica = store_of("a"), replica_of()
    stored = zeros(store)
    delta(1).add_to(stored, SUM)
    store.offer_stored({0: StoredState(term(4, "b"), stored, clean=True)})

    replica.set_version(0, term(4, "b"), 1)
    copied, state = replica_copy(store, replica, 5, 0) or (None, None)
    assert state is not None
    assert (copied, state.era_step, state.era_term) == (term(4, "b"), 1, term(4, "b"))
    assert state.knows(delta(1).identity)

    replica.set_version(0, term(4, "b"), 2)
    _, state = replica_copy(store, replica, 5, 0) or (None, None)
    assert state is not None
    assert (state.version, state.era_step) == (2, 5)
