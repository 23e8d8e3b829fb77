"""Copies of a shard's value out of the replica. Pure."""

from __future__ import annotations

import dataclasses

from training.exchange.store.replica import Replica
from training.exchange.store.shard_store import ShardStore
from training.exchange.terms import Term
from training.shards.state import ShardState


def replica_copy(store: ShardStore, replica: Replica, step: int, shard: int) -> tuple[Term, ShardState] | None:
    """What this node could go on from where nobody owns or backs the shard: its state from disk, or its replica, with
    its term. Either begins a new era: whoever comes later with the whole history takes the shard back."""
    pulled = replica.pulled_version(shard)
    stored = store.stored_above(shard, pulled)
    if stored is not None:
        # A state from disk knows its deltas: none need be refused for its age, and so the era is only told apart.
        era = stored.state.era_step + 1
        return stored.term, dataclasses.replace(
            stored.state, era_step=era, era_term=(stored.term.number, stored.term.node)
        )
    return None if pulled is None else (pulled[0], replica_state(store, replica, step, shard))


def replica_state(store: ShardStore, replica: Replica, step: int, shard: int) -> ShardState:
    """A state made of the replica: value and version only. Nobody knows which deltas newer than its step it lacks, so
    those that began before it are refused."""
    term, version = replica.version_of(shard)
    # At least 1: an era of 0 would have the whole history.
    return store.fresh_state(shard, replica.slice_of(shard), version=version, era_step=max(1, step), era_term=term)
