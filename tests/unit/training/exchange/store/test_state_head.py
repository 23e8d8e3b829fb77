"""The head of a state: everything but the arrays, there and back."""

from __future__ import annotations

import numpy as np
import pytest

from tests.harness.stores import IDS, store_of, term, zeros
from training.exchange.store.state_head import describe, restore
from training.shards.applied import DeltaId
from training.shards.outer_rule import Rule
from training.shards.state import ShardState

RULE = Rule(outer_lr=0.5, outer_momentum=0.5)


def full_state() -> ShardState:
    state = zeros(store_of("a", RULE))
    for step in (1, 2, 5):
        state.apply(DeltaId(IDS["x"], 1, step), 0.4, np.full(4, float(step), np.float32), RULE)
        state.norms.note(IDS["x"], 1, step, float(step))
    for step in (7, 6):
        state.add_pending(DeltaId(IDS["b"], 2, step), 0.25, np.full(4, float(step), np.float32), momentum=step == 7)
    state.era_step, state.era_term, state.folded_step = 3, (2, IDS["c"]), 5
    return state


def test_a_restored_state_is_the_described_one() -> None:
    """Every field, with the pending deltas in the order of the head."""
    before = full_state()
    head = describe(0, term(4, "a"), before)
    assert before.momentum is not None

    arrays = [item.delta for item in before.pending_deltas()]
    after = restore(head, before.parameters, before.value, before.momentum, arrays)

    assert describe(0, term(4, "a"), after) == head
    assert (head.term, head.has_momentum, [row[2] for row in head.pending]) == (term(4, "a"), True, [6, 7])
    assert [(item.delta[0], item.momentum) for item in after.pending_deltas()] == [(6.0, False), (7.0, True)]
    for step in (8, 9):
        for state in (before, after):
            state.apply(DeltaId(IDS["x"], 1, step), 0.4, np.ones(4, np.float32), RULE)
    assert after.value.tobytes() == before.value.tobytes()


def test_a_state_without_momentum_is_restored_without() -> None:
    """Nothing is allocated for it."""
    state = zeros(store_of("a"))

    after = restore(describe(0, term(1, "a"), state), state.parameters, state.value, None, [])

    assert after.momentum is None


def test_every_pending_delta_needs_its_array() -> None:
    """A missing array is an error, not a shorter state."""
    before = full_state()

    with pytest.raises(ValueError, match="zip"):
        restore(describe(0, term(4, "a"), before), before.parameters, before.value, None, [])
