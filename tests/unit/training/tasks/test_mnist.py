"""The task `mnist`: its network, learning, and missing files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from p2pnode.training.tasks.mnist import network
from p2pnode.training.trainer.loading import build_task
from p2pnode.training.trainer.runner import TaskRunner
from p2pnode.training.trainer_link.interface import StepOrder, TrainerFailed
from p2pnode.training.trainer_link.messages import DeltaSent, ValuesArrived


def build(task: str, options: dict[str, Any], data_dir: str = "") -> TaskRunner:
    return TaskRunner(task, *build_task(task, options, data_dir=data_dir, seed=0, node_seed=1, device="cpu"))


def write_mnist(folder: Path, count: int = 40) -> None:
    generator = np.random.default_rng(1)
    for kind in ("train", "t10k"):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = generator.integers(0, 60, (count, 28, 28)).astype(np.uint8)
        images[np.arange(count), labels] = 255  # Row k is bright in the images of class k.
        for name, values in (("images-idx3", images), ("labels-idx1", labels)):
            head = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
            (folder / f"{kind}-{name}-ubyte").write_bytes(head + values.tobytes())


def test_the_network_is_the_chapters() -> None:
    """Normalisation, 5×5 convolution of 32 maps, pooling, 1024, 10; normalisation has shared running statistics."""
    model = network()

    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert sum(parameter.numel() for parameter in model.parameters()) == 2 + 832 + (6272 * 1024 + 1024) + 10250


def test_mnist_learns(tmp_path: Path) -> None:
    """A few steps on a few images that are easy to distinguish; `eval_samples` bounds the evaluation."""
    write_mnist(tmp_path)
    runner = build("mnist", {"verify": False, "eval_samples": 30, "batch_size": 20}, str(tmp_path))
    vector = np.zeros(runner.model_vector.layout.total, np.float32)
    delta = np.zeros_like(vector)
    runner.model_vector.read(vector)

    runner.use(vector, delta)
    runner.train(StepOrder(1, 8, 1.0, True))
    vector += delta
    runner.apply(DeltaSent())
    runner.apply(ValuesArrived(1))
    evaluation = runner.evaluate(1)

    assert [entry.name for entry in runner.model_vector.layout.entries][-2:] == ["0.running_mean", "0.running_var"]
    assert evaluation is not None
    assert evaluation.samples == 30
    assert evaluation.metrics["accuracy"] > 0.5


def test_mnist_without_its_files_says_so(tmp_path: Path) -> None:
    """The folder is there, the files are not, and fetching is not allowed."""
    with pytest.raises(TrainerFailed, match=r"finds no train-images-idx3-ubyte\.gz in") as failure:
        build("mnist", {"fetch": False}, str(tmp_path))
    assert "training.data_dir" in failure.value.hint
