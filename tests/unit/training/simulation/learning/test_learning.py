"""What simulated nodes learn: gradients against differences, and rules of the server against their definitions."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from training.shards.applied import DeltaId
from training.shards.outer_rule import Rule
from training.shards.state import ShardState
from training.simulation.figures.points import plan_of
from training.simulation.learning.learning import Learner, LearningRule, learn
from training.simulation.learning.problems import (
    BadData,
    Cnn,
    Images,
    LinearRegression,
    MatrixFactorisation,
    Problem,
    SoftmaxRegression,
    Vector,
)

SEED = 4


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    """Eighty small pictures in the files' own format: a bright row per class, and noise."""
    folder = tmp_path_factory.mktemp("idx")
    generator = np.random.default_rng(SEED)
    for kind, count in (("train", 80), ("t10k", 40)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        pixels = generator.integers(0, 60, (count, 28, 28)).astype(np.uint8)
        pixels[np.arange(count), 2 * labels + 4] = 250
        head = bytes([0, 0, 8, 3]) + b"".join(size.to_bytes(4, "big") for size in pixels.shape)
        (folder / f"{kind}-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + pixels.tobytes()))
        head = bytes([0, 0, 8, 1]) + count.to_bytes(4, "big")
        (folder / f"{kind}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())
    return Images(folder)


def test_the_networks_gradient_is_that_of_its_loss(images: Images) -> None:
    """In each layer the gradient agrees with central differences of the loss, in float64."""
    network = Cnn(images, SEED, hidden=16)
    vector = network.initial().astype(np.float64)
    rows = np.arange(6)
    keep = (np.random.default_rng(1).random((6, Cnn.POOLED)) > 0.1).astype(np.float64)
    pictures, labels = images.images[rows].astype(np.float64), images.labels[rows]
    gradient = network.gradient(vector.astype(np.float32), images.images[rows], labels, keep.astype(np.float32))
    starts = np.cumsum([0, 25 * 32, 32, Cnn.POOLED * 16, 16, 160])

    for start in starts:
        layer = gradient[start : start + 400]
        place = int(start + np.abs(layer).argmax())
        nudge = np.zeros_like(vector)
        nudge[place] = 1e-3
        slope = network.loss(vector + nudge, pictures, labels, keep) - network.loss(
            vector - nudge, pictures, labels, keep
        )
        assert gradient[place] == pytest.approx(slope / 2e-3, rel=0.02, abs=1e-5)


def test_every_problem_is_learnt_by_a_swarm(images: Images) -> None:
    """Under pssp with additive updates each score gets better, and repeats from its seed."""
    problems: list[Problem] = [
        LinearRegression(SEED),
        SoftmaxRegression(images, SEED, learning_rate=0.02),
        MatrixFactorisation(SEED, users=30, items=20),
        Cnn(images, SEED, hidden=16, learning_rate=0.02, batch=16, tests=40),
    ]
    for problem in problems:
        plan = plan_of("pssp(4,2)", 4, 10)
        curve = learn(plan, problem, LearningRule("additive"), scores=3)[1]
        again = learn(plan, problem, LearningRule("additive"), scores=3)[1]

        better = curve.score[-1] > curve.score[0] if problem.better == "higher" else curve.score[-1] < curve.score[0]
        assert better, (problem.name, curve.score)
        assert curve.score == again.score
        assert curve.now_s[-1] == 10
        assert curve.updates == sorted(curve.updates)


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


def test_images_that_are_not_there_are_named(tmp_path: Path) -> None:
    """The message says which file was looked for, and where."""
    with pytest.raises(BadData, match="train-images-idx3-ubyte"):
        Images(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"\x00\x00\x08\x01nonsense")
    with pytest.raises(BadData, match="not an IDX file"):
        Images(tmp_path)
