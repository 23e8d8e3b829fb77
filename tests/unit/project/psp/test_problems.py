"""Problems for simulated nodes: gradients, convergence, and data that cannot be read."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from tests.harness.builders.linear_regression import LinearRegression
from tools.psp.learning import learn
from tools.psp.points import plan_of
from tools.psp.problems import (
    BadData,
    Cnn,
    Images,
    MatrixFactorisation,
    Problem,
    SoftmaxRegression,
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
    """Under pssp each score gets better, and repeats from its seed."""
    problems: list[Problem] = [
        LinearRegression(SEED),
        SoftmaxRegression(images, SEED, learning_rate=0.02),
        MatrixFactorisation(SEED, users=30, items=20),
        Cnn(images, SEED, hidden=16, learning_rate=0.02, batch=16, tests=40),
    ]
    for problem in problems:
        plan = plan_of("pssp(4,2)", 4, 10)
        curve = learn(plan, problem, scores=3)[1]
        again = learn(plan, problem, scores=3)[1]

        better = curve.score[-1] > curve.score[0] if problem.better == "higher" else curve.score[-1] < curve.score[0]
        assert better, (problem.name, curve.score)
        assert curve.score == again.score
        assert curve.now_s[-1] == 10
        assert curve.updates == sorted(curve.updates)


def test_images_that_are_not_there_are_named(tmp_path: Path) -> None:
    """The message names the file and its folder."""
    with pytest.raises(BadData, match="train-images-idx3-ubyte"):
        Images(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"\x00\x00\x08\x01nonsense")
    with pytest.raises(BadData, match="not an IDX file"):
        Images(tmp_path)
