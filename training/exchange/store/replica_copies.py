"""Copies of a shard's value out of the replica. Pure."""

from __future__ import annotations

import dataclasses

from training.exchange.context import ExchangeContext
from training.exchange.terms import Term
from training.shards.state import ShardState


def replica_copy(core: ExchangeContext, shard: int) -> tuple[Term, ShardState] | None:
    """What this node could go on from where nobody owns or backs the shard: its state from disk, or its replica, with
    its term. Either begins a new era: whoever comes later with the whole history takes the shard back."""
    mark = core.mark(shard)
    stored = core.store.stored_above(shard, mark)
    if stored is not None:
        # A state from disk knows its deltas: none need be refused for its age, and so the era is only told apart.
        era = stored.state.era_step + 1
        return stored.term, dataclasses.replace(
            stored.state, era_step=era, era_term=(stored.term.number, stored.term.node)
        )
    return None if mark is None else (mark[0], replica_state(core, shard))


def replica_state(core: ExchangeContext, shard: int) -> ShardState:
    """A state made of the replica: value and version only. Nobody knows which deltas newer than its step it lacks, so
    those that began before it are refused."""
    start, stop = core.store.bounds[shard]
    state = core.store.fresh_state(shard, core.replica[start:stop])
    state.version = core.marks[shard][1]
    # At least 1: an era is told by it.
    state.era_step, state.era_term = max(1, core.step), core.marks[shard][0]
    return state
