"""Describes a shard's state for the wire, without its values. Pure."""

from __future__ import annotations

from training.exchange.messages import StateHead
from training.exchange.terms import Term
from training.shards.state import ShardState


def describe(shard: int, term: Term, state: ShardState) -> StateHead:
    """The small part of a state; `term` is the one that holds once the receiver has it."""
    return StateHead(
        shard=shard,
        term_number=term.number,
        term_node=term.node,
        version=state.version,
        sum_weight=state.sum_weight,
        era_step=state.era_step,
        era_term=state.era_term,
        folded_step=state.folded_step,
        has_momentum=state.momentum is not None,
        applied=state.applied.rows(),
        held=[(*item.identity, item.weight, item.momentum) for item in state.held()],
        norms=state.norms.rows(),
    )
