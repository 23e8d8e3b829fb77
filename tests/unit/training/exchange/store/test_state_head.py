"""The head of a state: everything but the arrays, there and back."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tests.harness.builders.stores import IDS, store_of, term, zeros
from training.exchange.ownership_messages import ForgottenRows, StateHead
from training.exchange.store.state_stream import DELTAS_PER_STEP, PlausibleSteps, describe, implausible, restore
from training.exchange.terms import MAX_BELIEVED, Term
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


def with_version(head: StateHead, version: int) -> StateHead:
    return msgspec.structs.replace(head, version=version)


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


def test_what_a_state_has_forgotten_travels_with_it() -> None:
    """A learner refuses what its owner refuses; a head of an earlier version has forgotten nothing."""
    state = ShardState(np.zeros(2, np.float32), 2)
    for start, step in ((1, 5), (2, 9)):
        state.applied.add(DeltaId(b"n" * 20, start, step))
    state.applied.forget(b"n" * 20, 1)
    state.applied.add(DeltaId(b"o" * 20, 1, 3))
    state.applied.forget_nodes([b"o" * 20])
    raw = msgspec.msgpack.encode(describe(0, Term(1, b"n" * 20), state))
    head = msgspec.msgpack.decode(raw, type=StateHead)

    again = restore(head, 2, state.value, None, []).applied
    assert again == state.applied
    assert [again.may_have_forgotten(DeltaId(b"n" * 20, 1, step)) for step in (5, 500)] == [True, True]
    assert [again.may_have_forgotten(DeltaId(b"p" * 20, 1, step)) for step in (3, 4)] == [True, False]
    assert again.count() == 3

    former = msgspec.msgpack.encode(msgspec.msgpack.decode(raw)[:-1])
    assert not restore(msgspec.msgpack.decode(former, type=StateHead), 2, state.value, None, []).applied.forgotten


@pytest.mark.parametrize(
    ("forgotten", "reason"),
    [
        (ForgottenRows([(b"n" * 20, 2, 101)], 0, 1), "it has forgotten step 101"),
        (ForgottenRows([], 51, 1), "it has forgotten steps up to 51"),
        (ForgottenRows([], 0, MAX_BELIEVED), "its counts are too high"),
        (ForgottenRows([(b"n" * 20, 3, 100)], 50, 7), ""),
    ],
)
def test_a_head_that_forgets_what_is_still_to_come_is_not_believed(forgotten: ForgottenRows, reason: str) -> None:
    """It would have the deltas of a living node refused for ever."""
    state = ShardState(np.zeros(2, np.float32), 2)
    state.applied.add(DeltaId(b"n" * 20, 2, 9))
    head = msgspec.structs.replace(describe(0, Term(1, b"n" * 20), state), forgotten=forgotten)

    assert implausible(head, PlausibleSteps(furthest=100, likely=50)) == reason


def test_what_follows_a_version_that_is_believed_is_believed_too() -> None:
    """The version of a state that a liar has sent goes on to be counted by honest nodes. A step later all of them take
    it from each other, however high it was."""
    now, later = PlausibleSteps(2_002_000, 202_000), PlausibleSteps(2_004_000, 204_000)
    head = describe(0, term(4, "a"), full_state())
    taken = [version for version in (10**n for n in range(15)) if not implausible(with_version(head, version), now)]
    assert 10**9 < taken[-1] < MAX_BELIEVED / 1000
    highest = now.furthest * DELTAS_PER_STEP
    assert not implausible(with_version(head, highest), now)
    assert implausible(with_version(head, highest + 1), now) == "its counts are too high"
    assert not implausible(with_version(head, highest + 1_000_000), later)
