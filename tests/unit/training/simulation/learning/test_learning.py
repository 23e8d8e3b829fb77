"""Rules for applying deltas, against their definitions."""

from __future__ import annotations

import numpy as np
import pytest

from training.shards.applied import DeltaId
from training.shards.outer_rule import Rule
from training.shards.state import ShardState
from training.simulation.figures.points import plan_of
from training.simulation.learning.learning import Learner, LearningRule, learn
from training.simulation.learning.problems import (
    LinearRegression,
    Vector,
)

SEED = 4


class Counting:
    """A problem whose vector counts: each delta is one unit at the node's own place."""

    name, better, size = "counting", "higher", 5

    def __init__(self) -> None:
        self.bases: list[tuple[int, int, float]] = []

    def initial(self) -> Vector:
        return np.zeros(self.size, np.float32)

    def delta(self, vector: Vector, node: int, step: int) -> Vector:
        self.bases.append((node, step, float(vector.sum())))
        return np.eye(1, self.size, node, dtype=np.float32)[0]

    def score(self, vector: Vector) -> float:
        return float(vector.sum())


def test_additive_updates_are_added_once_each() -> None:
    """The model's sum is the number of completed steps, and each place that of its node."""
    problem = Counting()
    outcome, curve = learn(plan_of("asp", 5, 20), problem, LearningRule("additive"), scores=4)

    assert curve.score[-1] == outcome.updates == curve.updates[-1]


def test_ninox_adds_when_the_barrier_passes_and_all_start_from_one_model() -> None:
    """Under bsp and the delayed rule all nodes of a round compute from one model, five deltas a round later."""
    problem = Counting()
    learn(plan_of("bsp", 5, 20), problem, LearningRule("delayed"), scores=1)

    for _node, step, total in problem.bases:
        assert total == 5 * (step - 1)


def test_under_bsp_the_swarms_deltas_show_after_their_barrier() -> None:
    """With the daemon's rule (no momentum, rate 1) a node of round t sees exactly the rounds before, weighed 1/N."""
    problem = Counting()
    learn(plan_of("bsp", 5, 20), problem, LearningRule("swarm", outer_lr=1.0, outer_momentum=0.0), scores=1)

    for _node, step, total in problem.bases:
        assert total == pytest.approx(step - 1, abs=1e-4)


def test_the_swarms_rule_is_the_daemons_arithmetic() -> None:
    """The model equals a shard that was given the same deltas in the same order."""
    problem = LinearRegression(SEED)
    plan = plan_of("asp", 4, 10)
    applied: list[tuple[int, int, Vector]] = []
    usual = problem.delta

    def watched(vector: Vector, node: int, step: int) -> Vector:
        delta = usual(vector, node, step)
        applied.append((node, step, delta))
        return delta

    problem.delta = watched  # type: ignore[method-assign]
    curve = learn(plan, problem, LearningRule("swarm"), scores=1)[1]
    shard, rule = (
        ShardState(problem.initial(), problem.size),
        Rule(LearningRule().outer_lr, LearningRule().outer_momentum),
    )
    for node, step, delta in applied:
        shard.apply(DeltaId(bytes([node]) * 20, 1, step), 1 / 4, delta, rule)

    assert curve.score[-1] == pytest.approx(problem.score(shard.value))


def test_late_deltas_weigh_less_with_a_lag_weight() -> None:
    """(1 + lag)^−½: a delta pushed a whole round after its pull weighs 1/√2 of the share."""
    rule = LearningRule("swarm", lag_power=0.5)
    learner = Learner(Counting(), rule, lambda _node: 4.0, synchronous=False, every_s=1e9)
    learner._base_updates[0] = 0
    learner.updates = 1
    assert learner._weight(0) == pytest.approx(1 / 4)
    learner.updates = 5
    assert learner._weight(0) == pytest.approx(2**-0.5 / 4)
