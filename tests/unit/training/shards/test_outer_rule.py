"""The outer rule: one Nesterov step per whole weight, and plain addition between."""

from __future__ import annotations

import math

import numpy as np
import pytest

from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.shards.state import ShardState

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


def test_between_two_whole_weights_a_push_is_plain() -> None:
    """Before Σw reaches 1 a push adds η·w·delta only; the last one adds momentum."""
    state = shard(0.0)
    rule = Rule(outer_lr=1.0, outer_momentum=0.5)
    seen = []
    for step in range(1, 9):
        state.apply(identity(step), 0.25, vector(4.0), rule)
        seen.append(float(state.value[0]))

    # Round one: m = 4, + 0.5·4. Round two: m = 2 + 4, + 0.5·6.
    assert seen == [1.0, 2.0, 3.0, 4.0 + 2.0, 7.0, 8.0, 9.0, 10.0 + 3.0]


@pytest.mark.parametrize("workers", [1, 2, 3, 6, 7, 10, 11, 49, 100, 333, 1000])
def test_rounding_of_the_weights_does_not_shift_the_period(workers: int) -> None:
    """N pushes of 1/N reach a whole weight at the N-th, although their float sum may be below 1."""
    state = shard(0.0)
    for step in range(workers):
        assert state.value[0] == pytest.approx(0.7 * step / workers, rel=1e-4)
        state.apply(identity(step), 1 / workers, vector(1.0), NESTEROV)

    assert state.momentum is not None
    assert state.momentum[0] == pytest.approx(1.0, rel=1e-4)
    assert state.sum_weight == 0.0
    assert state.value[0] == pytest.approx(0.7 * (1.0 + 0.9), rel=1e-4)


def test_weights_above_one_step_at_every_push() -> None:
    """With `weight = "sum"` each push is a whole weight."""
    state = shard(0.0)
    rule = Rule(outer_lr=1.0, outer_momentum=0.5)
    state.apply(identity(1), 1.0, vector(1.0), rule)
    state.apply(identity(2), 3.0, vector(1.0), rule)

    # 1 + .5·1 = 1.5, then 3 + .5·(.5 + 3) = 4.75
    assert state.value[0] == 6.25


def test_within_a_round_the_momentum_has_its_deltas() -> None:
    """It decays once, with the first delta of a round, and takes each; a delta of weight 0 begins no round."""
    state = shard(0.0)
    rule = Rule(outer_lr=1.0, outer_momentum=0.5)
    seen = []
    for step, weight in enumerate((1.0, 0.0, 0.5, 0.0, 0.25, 0.25, 0.5)):
        state.apply(identity(step), weight, vector(4.0), rule)
        assert state.momentum is not None
        seen.append((float(state.momentum[0]), state.sum_weight))

    assert seen == [(4.0, 0.0), (4.0, 0.0), (4.0, 0.5), (4.0, 0.5), (5.0, 0.75), (6.0, 0.0), (5.0, 0.5)]


def test_without_momentum_a_push_is_the_weighted_delta() -> None:
    """μ = 0: value = start + η Σ w·delta, and no array for momentum is allocated."""
    state = shard(1.0, 2.0)
    for step, weight in enumerate((0.5, 1.0, 0.25)):
        state.apply(identity(step), weight, vector(4.0, -8.0), SUM)

    assert state.value.tolist() == [1.0 + 7.0, 2.0 - 14.0]
    assert state.momentum is None
    assert state.version == 3


def test_the_weights_of_a_round_are_summed_in_double_precision() -> None:
    """In float32 a thousand weights of 1/1000 would miss the tolerance."""
    state = shard(0.0)
    for step in range(999):
        state.apply(identity(step), 1 / 1000, vector(0.0), NESTEROV)

    assert math.isclose(state.sum_weight, 0.999, rel_tol=1e-12)
