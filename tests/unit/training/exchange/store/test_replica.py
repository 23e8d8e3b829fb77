"""The replica: the vector, and the version of each shard in it."""

from __future__ import annotations

import numpy as np

from tests.harness.builders.stores import BOUNDS, term
from training.exchange.store.replica import NO_POSITION, Position, Replica
from training.exchange.terms import ZERO_TERM


def test_a_shard_that_was_never_pulled_has_no_version() -> None:
    """After a pull it has the term and version that came with it."""
    replica = Replica(np.zeros(16, np.float32), BOUNDS)
    assert replica.pulled_version(1) is None
    assert replica.version_of(1) == (ZERO_TERM, 0)

    replica.set_version(1, term(3, "b"), 7)
    assert replica.pulled_version(1) == replica.version_of(1) == (term(3, "b"), 7)
    assert replica.pulled_version(0) is None


def test_a_slice_is_the_trainers_memory() -> None:
    """What is written into a slice is in the vector, without a copy."""
    vector = np.zeros(16, np.float32)
    replica = Replica(vector, BOUNDS)
    replica.slice_of(2)[:] = 1.0
    assert vector.tolist() == [0.0] * 8 + [1.0] * 4 + [0.0] * 4


def test_the_versions_of_a_checkpoint_are_adopted_if_they_fit() -> None:
    """A checkpoint with another number of shards is ignored; the returned list is a copy."""
    replica = Replica(np.zeros(16, np.float32), BOUNDS)
    replica.restore_versions([(term(1, "a"), 1)] * 3)
    assert replica.versions() == [(ZERO_TERM, 0)] * 4

    versions = [(term(1, "a"), shard) for shard in range(4)]
    replica.restore_versions(versions)
    replica.versions()[0] = (term(9, "x"), 9)
    assert replica.versions() == versions


def test_a_position_in_a_chain_ends_with_whatever_else_is_recorded() -> None:
    """A version without a position, a doubt, the versions of a checkpoint."""
    replica = Replica(np.zeros(16, np.float32), BOUNDS)
    assert replica.position_of(1) == NO_POSITION
    place = Position(b"c" * 8, 3)

    replica.set_version(1, term(2, "a"), 7, place)
    assert (replica.position_of(1), replica.position_of(0)) == (place, NO_POSITION)
    replica.set_version(1, term(2, "a"), 7)
    assert replica.position_of(1) == NO_POSITION

    replica.set_version(1, term(2, "a"), 7, place)
    replica.doubt(1)
    assert (replica.position_of(1), replica.version_of(1)) == (NO_POSITION, (term(2, "a"), 0))

    replica.set_version(1, term(2, "a"), 7, place)
    replica.restore_versions([(term(1, "a"), 1)] * 4)
    assert replica.position_of(1) == NO_POSITION
