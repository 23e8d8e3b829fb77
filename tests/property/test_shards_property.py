"""Shards against plain models: identities against a set, folding against sorting, the rule against double precision."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pnode.training.shards.applied import Applied, DeltaId
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.shards.state import ShardState

FIXED = settings(derandomize=True, database=None, deadline=None, max_examples=80)

NODES = [b"a" * 20, b"b" * 20]
IDENTITIES = st.builds(DeltaId, st.sampled_from(NODES), st.integers(0, 1), st.integers(0, 40))


@FIXED
@given(st.lists(IDENTITIES, max_size=80))
def test_ranges_are_a_set(added: list[DeltaId]) -> None:
    """Whatever is added in any order, exactly that is in (with fewer ranges than the limit)."""
    applied = Applied()
    model: set[DeltaId] = set()
    for identity in added:
        applied.add(identity)
        model.add(identity)

    everything = [DeltaId(node, start, step) for node in NODES for start in (0, 1) for step in range(-1, 42)]
    assert {identity for identity in everything if identity in applied} == model


@FIXED
@given(st.lists(IDENTITIES, max_size=80))
def test_ranges_are_sorted_disjoint_and_as_few_as_can_be(added: list[DeltaId]) -> None:
    """Neighbours are joined: a node that skips no step has one range."""
    applied = Applied()
    for identity in added:
        applied.add(identity)

    for _, _, ranges in applied.rows():
        assert all(low <= high for low, high in ranges)
        assert all(before[1] + 1 < after[0] for before, after in pairwise(ranges))


@FIXED
@given(st.lists(st.integers(0, 500), max_size=200, unique=True))
def test_beyond_the_limit_only_old_gaps_close(steps: list[int]) -> None:
    """What was added stays in; what is wrongly in is below every range but the first."""
    applied = Applied()
    for step in steps:
        applied.add(DeltaId(NODES[0], 1, step))

    rows = applied.rows()
    ranges = rows[0][2] if rows else []
    assert len(ranges) <= Applied.MAX_RANGES
    assert all(DeltaId(NODES[0], 1, step) in applied for step in steps)
    wrongly = [step for step in range(502) if step not in steps and DeltaId(NODES[0], 1, step) in applied]
    assert all(step <= ranges[0][1] for step in wrongly)
    assert not wrongly or len(ranges) == Applied.MAX_RANGES


@FIXED
@given(st.lists(IDENTITIES, max_size=40), st.lists(IDENTITIES, max_size=40))
def test_the_order_of_adding_does_not_matter(first: list[DeltaId], second: list[DeltaId]) -> None:
    """The same identities in different orders, some twice, give equal sets."""
    one, other = Applied(), Applied()
    for identity in [*first, *second]:
        one.add(identity)
    for identity in [*reversed(second), *first, *first]:
        other.add(identity)

    assert sorted(one.rows()) == sorted(other.rows())


HELD = st.lists(
    st.tuples(IDENTITIES, st.sampled_from([0.25, 0.5, 1.0]), st.integers(-64, 64)),
    max_size=25,
    unique_by=lambda item: item[0],
)


@FIXED
@given(HELD, st.lists(st.integers(0, 45), max_size=6), st.randoms(use_true_random=False))
def test_any_folding_gives_each_pending_delta_once(held: list[Any], folds: list[int], rng: Any) -> None:
    """However deltas and folds alternate, each identity ends up in the value exactly once."""
    rule = Rule(outer_lr=1.0, outer_momentum=0.0)
    state = ShardState(value=np.zeros(1, dtype=np.float32), parameters=1)
    events: list[Any] = [*held, *folds]
    rng.shuffle(events)
    reached = 0
    for event in events:
        if isinstance(event, int):
            state.fold(event, rule)
            reached = max(reached, event)
            assert all(step > event for step in state.pending)
        else:
            identity, weight, amount = event
            assert not state.knows(identity)
            state.add_pending(identity, weight, np.array([amount], dtype=np.float32))
            assert state.knows(identity)
        assert state.folded_step == reached
    state.fold(100, rule)

    assert state.version == len(held)
    assert not state.pending
    assert state.value[0] == sum(weight * amount for _, weight, amount in held)


@FIXED
@given(HELD, st.randoms(use_true_random=False))
def test_folding_is_bitwise_independent_of_arrival(held: list[Any], rng: Any) -> None:
    """Owner and backup fold the same pending deltas to the same bits, momentum included."""
    rule = Rule(outer_lr=0.7, outer_momentum=0.9)
    results = []
    for _ in range(2):
        rng.shuffle(held)
        state = ShardState(value=np.full(2, 0.1, dtype=np.float32), parameters=1)
        for identity, weight, amount in held:
            state.add_pending(identity, weight, np.array([amount / 3, amount / 7], dtype=np.float32))
        state.fold(100, rule)
        momentum = b"" if state.momentum is None else state.momentum.tobytes()
        results.append((state.value.tobytes(), momentum, state.sum_weight, state.version))

    assert results[0] == results[1]


@FIXED
@given(
    st.integers(1, 12),
    st.integers(1, 4),
    st.floats(0.01, 2.0),
    st.floats(0.0, 0.95),
    st.integers(0, 2**32 - 1),
)
def test_whole_rounds_are_nesterov_steps(workers: int, rounds: int, rate: float, momentum: float, seed: int) -> None:
    """For any number of workers, rate and momentum, whole rounds equal Nesterov steps on the averages."""
    rng = np.random.default_rng(seed)
    state = ShardState(value=np.zeros(4, dtype=np.float32), parameters=3)
    expected, velocity = np.zeros(4), np.zeros(3)
    for turn in range(rounds):
        deltas = rng.normal(size=(workers, 4)).astype(np.float32)
        for place, delta in enumerate(deltas):
            state.apply(DeltaId(NODES[0], place, turn), 1 / workers, delta, Rule(rate, momentum))
        average = deltas.astype(np.float64).mean(axis=0)
        velocity = momentum * velocity + average[:3]
        expected[:3] += rate * (average[:3] + momentum * velocity)
        expected[3] += average[3]

    np.testing.assert_allclose(state.value, expected, rtol=1e-4, atol=1e-4)


@FIXED
@given(st.lists(st.tuples(IDENTITIES, st.integers(-8, 8)), max_size=30, unique_by=lambda item: item[0]))
def test_apply_commutes_without_momentum(deltas: list[tuple[DeltaId, int]]) -> None:
    """Owner and backup may add deltas in any order: the values are equal (small whole numbers add exactly)."""
    rule = Rule(outer_lr=1.0, outer_momentum=0.0)
    states = []
    for order in (deltas, deltas[::-1], sorted(deltas)):
        state = ShardState(value=np.zeros(2, dtype=np.float32), parameters=1)
        for identity, amount in order:
            state.apply(identity, 1.0, np.array([amount, -amount], dtype=np.float32), rule)
        states.append((state.value.tolist(), state.version, sorted(state.applied.rows())))

    assert states[0] == states[1] == states[2]
