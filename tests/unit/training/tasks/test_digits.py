"""The task `digits`: its data, and what nodes learn alone and together."""

from __future__ import annotations

import numpy as np

from p2pnode.training.tasks.digits import load_digits
from p2pnode.training.trainer.loading import build_task
from p2pnode.training.trainer.runner import TaskRunner
from p2pnode.training.trainer.standalone import train_alone
from p2pnode.training.trainer_link.interface import StepOrder
from p2pnode.training.trainer_link.messages import DeltaSent, ValuesArrived
from tests.harness.project.repository import ROOT


def test_the_digits_are_the_known_1797() -> None:
    """1,797 images of 64 values from 0 to 2, and about as many of each digit; with a licence beside the file."""
    images, labels = load_digits()

    assert images.shape == (1797, 64)
    assert (images.min(), images.max()) == (0, 2)
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    licence = (ROOT / "training" / "tasks" / "data" / "LICENSE-digits.txt").read_text()
    assert "CC BY 4.0" in licence
    assert "doi.org" in licence


def test_a_node_alone_stays_near_070_and_four_together_reach_095() -> None:
    """Quarters that lack three classes each: plain averaging of four nodes knows all ten digits, none alone does."""
    options = [{"part": part, "parts": 4, "lacking": 3} for part in range(4)]
    alone = [train_alone("digits", option, local_steps=10, steps=20)["accuracy"] for option in options]
    nodes = [
        TaskRunner("digits", *build_task("digits", option, data_dir="", seed=0, node_seed=part, device="cpu"))
        for part, option in enumerate(options)
    ]
    vector = np.zeros(nodes[0].model_vector.layout.total, np.float32)
    nodes[0].model_vector.read(vector)
    deltas = [np.zeros_like(vector) for _ in nodes]
    for node, delta in zip(nodes, deltas, strict=True):
        node.use(vector, delta)

    for step in range(1, 21):
        for node in nodes:
            node.train(StepOrder(step, 10, 4.0, step == 1))
        vector += 0.7 * np.mean(deltas, axis=0)
        for node in nodes:
            node.apply(DeltaSent())
            node.apply(ValuesArrived(step))
    together = nodes[0].evaluate(20)

    assert all(0.6 < accuracy < 0.75 for accuracy in alone), alone
    assert together is not None
    assert together.metrics["accuracy"] >= 0.955
    assert together.samples == 360
