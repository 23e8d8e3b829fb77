"""The rule for applying deltas, against its definition."""

from __future__ import annotations

import numpy as np

from p2pnode.training.simulation.figures.points import plan_of
from p2pnode.training.simulation.learning.learning import learn
from p2pnode.training.simulation.learning.problems import Vector


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


def test_ninox_adds_when_the_barrier_passes_and_all_start_from_one_model() -> None:
    """Under bsp and the delayed rule all nodes of a round compute from one model, five deltas a round later."""
    problem = Counting()
    learn(plan_of("bsp", 5, 20), problem, scores=1)

    for _node, step, total in problem.bases:
        assert total == 5 * (step - 1)
