"""Converts a shard's state to its head, which has everything but the arrays, and back. Pure.

The same head goes over the wire (`state_stream`) and to disk (`state_files`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from training.encoding.codecs import Vector
from training.exchange.ownership_messages import ForgottenRows, StateHead, set_of
from training.exchange.terms import MAX_BELIEVED, Term
from training.shards.applied import DeltaId
from training.shards.robust import Norms
from training.shards.state import ShardState


def describe(shard: int, term: Term, state: ShardState) -> StateHead:
    """The head of a state; `term` is the one that is valid once the receiver has the state."""
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
        pending=[(*item.identity, item.weight, item.momentum) for item in state.pending_deltas()],
        norms=state.norms.rows(),
        plain=[place for place, item in enumerate(state.pending_deltas()) if item.plain],
        unlisted=state.unlisted,
        forgotten=ForgottenRows.of(state.applied),
    )


class PlausibleSteps(NamedTuple):
    """The last step that a delta of any node may have, and the last with which an era may begin."""

    furthest: int
    likely: int


#: A version counts deltas: no step has as many. The bound grows faster than any version that was believed, so that
#: those who go on counting from it are believed too.
DELTAS_PER_STEP = 10_000
#: For what this node has written itself: whatever fits a message after more deltas.
ANY_STEPS = PlausibleSteps(MAX_BELIEVED, MAX_BELIEVED)


def implausible(head: StateHead, most: PlausibleSteps) -> str:
    """Why the head of a state is not believed; empty if it is.

    What follows the numbers of a state that is taken over must fit a message too; and a set of identities or an era
    that reaches into the future would have the deltas refused that are still to come.
    """
    most_version = min(MAX_BELIEVED - 1, most.furthest * DELTAS_PER_STEP)
    if head.version > most_version or max(head.folded_step, head.unlisted) >= MAX_BELIEVED:
        return "its counts are too high"
    if head.era_step > most.likely:
        return f"its era begins with step {head.era_step}"
    last = max((high for _, _, ranges in head.applied for _, high in ranges), default=0)
    if last > most.furthest:
        return f"it has deltas of step {last}"
    return "" if head.forgotten is None else _implausibly_forgotten(head.forgotten, most)


def _implausibly_forgotten(forgotten: ForgottenRows, most: PlausibleSteps) -> str:
    """Deltas that a state may have forgotten are refused for ever."""
    if forgotten.count >= MAX_BELIEVED:
        return "its counts are too high"
    if forgotten.before > most.likely:
        return f"it has forgotten steps up to {forgotten.before}"
    last = max((step for _, _, step in forgotten.floors), default=0)
    return f"it has forgotten step {last}" if last > most.furthest else ""


def restore(
    head: StateHead, parameters: int, value: Vector, momentum: Vector | None, pending: Sequence[Vector]
) -> ShardState:
    """The state of a head and its arrays; `pending` in the order of the head. The arrays are kept, not copied."""
    state = ShardState(
        value=value,
        parameters=parameters,
        momentum=momentum,
        sum_weight=head.sum_weight,
        version=head.version,
        era_step=head.era_step,
        era_term=head.era_term,
        applied=set_of(head.applied, head.forgotten),
        folded_step=head.folded_step,
        norms=Norms(head.norms),
        unlisted=head.unlisted,
    )
    plain = dict.fromkeys(head.plain)
    for place, ((node, incarnation, step, weight, has_momentum), delta) in enumerate(
        zip(head.pending, pending, strict=True)
    ):
        identity = DeltaId(node, incarnation, step)
        state.add_pending(identity, weight, delta, momentum=has_momentum, plain=place in plain)
    return state
