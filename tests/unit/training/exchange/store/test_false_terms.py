"""What is dropped with terms that were never given, and what stays."""

from __future__ import annotations

import numpy as np
import pytest

from tests.harness.builders.stores import BOUNDS, contact, store_of, term, zeros
from training.exchange.store.false_terms import forget_terms_above
from training.exchange.store.records import StoredState
from training.exchange.store.repair_log import SupersededCopy
from training.exchange.store.replica import Replica
from training.exchange.store.shard_store import ShardStore
from training.exchange.terms import GENERATION, MAX_GENERATIONS_AHEAD, ZERO_TERM

LIMIT, FALSE = 100, 1 << 60


def replica_of(*numbers: int) -> Replica:
    replica = Replica(np.zeros(16, np.float32), BOUNDS)
    for shard, number in enumerate(numbers):
        replica.set_version(shard, term(number, "b"), 5)
    return replica


def test_a_false_term_is_not_believed_again_where_no_true_one_is_known_yet() -> None:
    """The member that made it up may be asked first."""
    store = store_of("a")
    limit = (3 + MAX_GENERATIONS_AHEAD + 1) * GENERATION - 1
    store.note_owner(0, term(FALSE, "c"), contact("c"))
    assert forget_terms_above(store, replica_of(FALSE), limit) == [0]
    assert not store.note_owner(0, term(FALSE, "c"), contact("c"))
    assert store.note_owner(0, term(3 * GENERATION, "b"), contact("b"))


def test_owners_and_fences_under_a_false_term_are_forgotten() -> None:
    """The true owner is believed from then on, and the fences that are written are those that are left."""
    store, replica = store_of("a"), replica_of(7, FALSE, 7, 7)
    store.note_owner(0, term(7, "b"), contact("b"))
    store.ownership.raise_fence(1, term(FALSE, "c"))
    store.note_owner(1, term(FALSE + 1, "c"), contact("c"))
    store.ownership.take_unsaved_fences()
    assert not store.note_owner(1, term(8, "b"), contact("b"))

    assert forget_terms_above(store, replica, LIMIT) == [1]

    assert store.ownership.take_unsaved_fences() == {0: term(7, "b")}
    assert store.ownership.highest == 7
    assert set(store.ownership.known_owners) == {0}
    assert [replica.pulled_version(shard) is None for shard in range(4)] == [False, True, False, False]
    assert store.note_owner(1, term(8, "b"), contact("b"))
    assert not store.ownership.is_plausible(term(FALSE, "c"))


@pytest.mark.parametrize(("number", "stays"), [(LIMIT, True), (LIMIT + 1, False)])
def test_copies_under_a_false_term_are_dropped(number: int, stays: bool) -> None:
    """Owned, backed up, learned, from disk, and superseded: up to the limit they stay."""

    def store() -> ShardStore:
        found = store_of("a")
        found.own(0, zeros(found), term(number, "a"), contact("a"), 0.0, by_handover=False)
        assert found.begin_catch_up(1, term(number, "b"), contact("b"))
        assert found.begin_catch_up(3, term(number - 2, "b"), contact("b"))
        assert found.take_state(3, term(number, "b"), contact("b"), zeros(found, 3))
        found.offer_stored({2: StoredState(term(number, "b"), zeros(found, 2), clean=False)})
        found.superseded[2] = SupersededCopy(term(number, "b"), zeros(found, 2))
        return found

    kept = store()
    forget_terms_above(kept, replica_of(1, 1, 1, 1), LIMIT)
    found = [0 in kept.owned, 1 in kept.backed, 3 in kept.backed, 2 in kept.stored, 2 in kept.superseded]
    assert found == [stays] * 5
    assert (kept.ownership.fence(0) == ZERO_TERM) is not stays
