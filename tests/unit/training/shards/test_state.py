"""The state of a shard: each identity once, in any order; pending deltas; independent copies."""

from __future__ import annotations

import math

import numpy as np
import pytest

from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.shards.state import ShardState
from p2pnode.training.shards.value_batch import KeyResult, KeyUpdate, ValueBatch
from p2pnode.training.shards.value_table import ValueTable

PLAIN = Rule(outer_lr=0.7, outer_momentum=0.0)
NESTEROV = Rule(outer_lr=0.7, outer_momentum=0.9)
SUM = Rule(outer_lr=1.0, outer_momentum=0.0)

NODES = [bytes([letter]) * 20 for letter in b"abcdef"]


def identity(step: int, node: int = 0, incarnation: int = 1) -> DeltaId:
    return DeltaId(NODES[node], incarnation, step)


def shard(*values: float, parameters: int | None = None) -> ShardState:
    value = np.array(values, dtype=np.float32)
    return ShardState(value=value, parameters=value.size if parameters is None else parameters)


def vector(*values: float) -> Vector:
    return np.array(values, dtype=np.float32)


# -- additions --------------------------------------------------------------------------------------------------------


def test_buffers_are_averaged_without_momentum_and_without_outer_lr() -> None:
    """The values after `parameters` take w·delta; a running mean reaches the average, no more."""
    rule = Rule(outer_lr=0.5, outer_momentum=0.5)
    state = shard(0.0, 0.0, 10.0, 10.0, parameters=2)
    for step in range(4):
        state.apply(identity(step), 0.25, vector(4.0, 4.0, 4.0, -8.0), rule)

    # Parameters: η·ḡ + η·μ·m = 2 + 1.
    assert state.value.tolist() == [3.0, 3.0, 14.0, 2.0]
    assert state.momentum is not None
    assert state.momentum.shape == (2,)


@pytest.mark.parametrize("rule", [PLAIN, NESTEROV])
def test_an_addition_says_whether_it_saw_all_values_in_range(rule: Rule) -> None:
    """Parameters, momentum and buffers; a copy of the state and a state without deltas have been seen by nobody."""
    state = shard(1.0, 2.0, 3.0, parameters=2)
    state.note_addition(5.0)
    assert state.looked_s == -math.inf
    state.apply(identity(1), 1.0, vector(1.0, 1.0, 1.0), rule)
    assert state.sound_version == state.version == 1
    state.note_addition(6.0)
    assert (state.looked_s, state.copy().looked_s, state.copy().sound_version) == (6.0, -math.inf, -1)
    state.note_addition(7.0)  # of no delta: nothing was added since
    assert state.looked_s == 6.0


@pytest.mark.parametrize("number", [np.nan, -np.inf, 3e38, 1e18])
@pytest.mark.parametrize("place", [0, 1, 2, "momentum"])
def test_a_value_out_of_range_is_never_called_sound(number: float, place: int | str) -> None:
    """Whichever array has it: a parameter, a buffer, or the momentum, which the next addition moves or leaves."""
    for rule in (NESTEROV, PLAIN):
        state = shard(1.0, 2.0, 3.0, parameters=2)
        state.momentum = vector(0.5, 0.5)
        if isinstance(place, int):
            state.value[place] = number
        else:
            state.momentum[1] = number
        with np.errstate(all="ignore"):
            state.apply(identity(1), 0.25, vector(1.0, 1.0, 1.0), rule)
        state.note_addition(6.0)
        assert (state.sound_version, state.looked_s) == (-1, -math.inf)


def test_a_sound_version_is_no_longer_than_a_state_may_be() -> None:
    """However many values there are: each alone is in range, and together they are too long."""
    state = ShardState(np.full(10_000, 2e16, np.float32), 10_000)
    assert not state.is_in_range()
    state.apply(identity(1), 1.0, np.zeros(10_000, np.float32), PLAIN)
    assert state.sound_version == -1


def test_a_shard_of_buffers_only_has_no_momentum() -> None:
    """Without parameters there is nothing for momentum to act on."""
    state = shard(1.0, 1.0, parameters=0)
    for step in range(3):
        state.apply(identity(step), 1.0, vector(1.0, 2.0), NESTEROV)

    assert state.value.tolist() == [4.0, 7.0]
    assert state.momentum is None


def test_the_added_delta_is_not_changed() -> None:
    """The same array goes to the backup: it must not be scaled in place."""
    delta = vector(1.0, 2.0, 3.0)
    delta.flags.writeable = False

    shard(0.0, 0.0, 0.0, parameters=2).apply(identity(1), 0.5, delta, NESTEROV)

    assert delta.tolist() == [1.0, 2.0, 3.0]


# -- bulk-synchronous: pending deltas ---------------------------------------------------------------------------------


def test_a_pending_delta_is_known_but_not_visible() -> None:
    """The value changes with the fold; a retry is recognised before."""
    state = shard(0.0)
    state.add_pending(identity(3), 1.0, vector(5.0))

    assert state.value[0] == 0.0
    assert state.version == 0
    assert state.knows(identity(3))
    assert not state.knows(identity(3, node=1))
    assert not state.knows(identity(3, incarnation=2))
    assert not state.knows(identity(2))


def test_folding_takes_the_steps_up_to_the_barrier_only() -> None:
    """A node that is one step ahead has pushed step t + 1, which must not be visible yet."""
    state = shard(0.0)
    for step in (1, 2, 3):
        state.add_pending(identity(step), 1.0, vector(10.0**step))

    assert state.fold(2, SUM) == 2
    assert state.value[0] == 110.0
    assert state.knows(identity(1))
    assert state.knows(identity(3))
    assert list(state.pending) == [3]
    assert state.folded_step == 2


# -- copies and sizes -------------------------------------------------------------------------------------------------


def test_a_copy_is_independent_in_every_part() -> None:
    """A change of the owner's state does not change the snapshot, nor the other way round."""
    state = shard(0.0, 0.0)
    state.apply(identity(1), 0.5, vector(1.0, 1.0), NESTEROV)
    state.add_pending(identity(2), 1.0, vector(2.0, 2.0))
    state.era_step, state.folded_step = 3, 4
    twin = state.copy()
    before = (twin.value.tolist(), twin.applied.rows(), twin.sum_weight, twin.version, len(twin.pending[2]))

    state.apply(identity(9), 0.5, vector(1.0, 1.0), NESTEROV)
    state.add_pending(identity(2, node=1), 1.0, vector(2.0, 2.0))
    state.fold(2, NESTEROV)

    assert (twin.value.tolist(), twin.applied.rows(), twin.sum_weight, twin.version, len(twin.pending[2])) == before
    assert (twin.era_step, twin.folded_step) == (3, 4)
    assert twin.momentum is not None
    assert twin.momentum.tolist() == [0.5, 0.5]


def test_a_copy_continues_like_its_original() -> None:
    """The same deltas give the same bits: a copy leaves nothing out."""
    rng = np.random.default_rng(6)
    state = ShardState(value=np.zeros(9, dtype=np.float32), parameters=6)
    for step in range(5):
        state.apply(identity(step), 0.3, rng.normal(size=9).astype(np.float32), NESTEROV)
    twin = state.copy()
    for step in range(5, 12):
        delta = rng.normal(size=9).astype(np.float32)
        state.apply(identity(step), 0.3, delta, NESTEROV)
        twin.apply(identity(step), 0.3, delta, NESTEROV)

    assert twin.value.tobytes() == state.value.tobytes()


def test_the_size_counts_every_array() -> None:
    """Value, momentum and each pending delta, in bytes."""
    state = shard(*[0.0] * 10, parameters=4)
    assert state.size_bytes == 40
    state.apply(identity(1), 0.5, vector(*[0.0] * 10), NESTEROV)
    assert state.size_bytes == 40 + 16
    state.add_pending(identity(2), 0.5, vector(*[0.0] * 10))
    assert state.size_bytes == 56 + 40


def test_a_delta_from_a_split_changes_the_value_only() -> None:
    """Momentum is the present direction; a delta of another time is added without it."""
    rule = Rule(outer_lr=0.5, outer_momentum=0.5)
    state = shard(0.0)
    state.apply(identity(1), 1.0, vector(1.0), rule, momentum=False)

    assert float(state.value[0]) == 0.5
    assert state.momentum is None
    state.add_pending(identity(2), 1.0, vector(1.0), momentum=False)
    state.fold(2, rule)
    assert float(state.value[0]) == 1.0
    assert state.momentum is None


# -- plain deltas -----------------------------------------------------------------------------------------------------


def test_a_plain_delta_is_added_as_it_is() -> None:
    """Rate 1 for parameters and buffers, whatever the rule; it moves no momentum and does not count in Σw."""
    state = shard(0.0, 0.0, 10.0, parameters=2)
    state.apply(identity(1), 0.5, vector(4.0, 0.0, 4.0), NESTEROV, plain=True)

    assert state.value.tolist() == [2.0, 0.0, 12.0]
    assert state.momentum is None
    assert state.sum_weight == 0.0

    state.apply(identity(2), 0.5, vector(1.0, 1.0, 0.0), NESTEROV)
    before = state.copy()
    state.apply(identity(3), 1.0, vector(1.0, 1.0, 1.0), NESTEROV, plain=True)

    assert (state.value - before.value).tolist() == [1.0, 1.0, 1.0]
    assert state.sum_weight == before.sum_weight == 0.5
    assert state.momentum is not None
    assert before.momentum is not None
    assert np.array_equal(state.momentum, before.momentum)
    assert state.version == 3


def test_a_pending_delta_stays_plain() -> None:
    """The barrier passes later: the rule is that of the delta, not of its step, also in a copy."""
    state = shard(0.0)
    state.add_pending(identity(1), 0.5, vector(2.0), plain=True)
    state.add_pending(identity(1, node=1), 0.5, vector(2.0))
    copy = state.copy()

    for one in (state, copy):
        assert one.fold(1, PLAIN) == 2
        assert one.value.tolist() == [np.float32(2.0 * 0.5 + 2.0 * 0.5 * 0.7)]


def test_a_copy_has_a_table_of_its_own() -> None:
    """What is applied to the one does not change the other: a snapshot is sent while its owner goes on."""
    state = ShardState(np.zeros(0, np.float32), 0, table=ValueTable())
    copy = state.copy()
    update = KeyUpdate(b"n" * 20, 1, 1, b"sk", "replace", b"1", 0)
    state.apply_batch(DeltaId(b"n" * 20, 1, 1), ValueBatch(1, [update], [KeyResult(b"sk", 0)]))
    assert copy.table == ValueTable()
    assert state.table != copy.table
    assert not copy.is_copy_of(state)
    assert state.size_bytes > copy.size_bytes
