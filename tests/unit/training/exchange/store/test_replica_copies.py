"""States built from a replica or from disk, for a take-over without a better copy."""

from __future__ import annotations

import numpy as np

from tests.harness.builders.stores import BOUNDS, delta, store_of, term, zeros
from training.exchange.store.copies import replica_copy, replica_state
from training.exchange.store.records import StoredState
from training.exchange.store.replica import Replica
from training.shards.outer_rule import Rule

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
