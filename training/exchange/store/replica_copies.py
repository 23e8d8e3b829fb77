"""Builds the state of a shard from this node's replica, for a take-over without any better copy. Pure."""

from __future__ import annotations

import dataclasses

from training.exchange.store.records import StoredState
from training.exchange.store.replica import Replica
from training.exchange.store.shard_store import ShardStore
from training.exchange.terms import Term
from training.shards.state import ShardState


def stored_above(store: ShardStore, shard: int, replica: tuple[Term, int] | None) -> StoredState | None:
    """The state from disk, unless the replica is newer; at the same version it is preferred: it has identities."""
    stored = store.stored.get(shard)
    if stored is None or (replica is not None and replica > (stored.term, stored.state.version)):
        return None
    return stored


def replica_copy(store: ShardStore, replica: Replica, step: int, shard: int) -> tuple[Term, ShardState] | None:
    """The state from disk, or the replica, and its term: a start for this node if the shard has no owner and no backup.
    Either begins a new era, so that a later copy with the whole history replaces it."""
    pulled = replica.pulled_version(shard)
    stored = stored_above(store, shard, pulled)
    if stored is not None:
        # A state from disk has its identities, so that no delta is refused for its age: any new era number will do.
        era = stored.state.era_step + 1
        return stored.term, dataclasses.replace(
            stored.state, era_step=era, era_term=(stored.term.number, stored.term.node)
        )
    return None if pulled is None else (pulled[0], replica_state(store, replica, step, shard))


def replica_state(store: ShardStore, replica: Replica, step: int, shard: int) -> ShardState:
    """A state of value and version. Deltas with a base before it are refused: it is unknown which of them it has."""
    term, version = replica.version_of(shard)
    # At least 1: an era of 0 would have the whole history.
    state = store.fresh_state(shard, replica.slice_of(shard), version=version, era_step=max(1, step), era_term=term)
    state.unlisted = version
    return state
