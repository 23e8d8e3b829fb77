"""Exported models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.harness.task_node import TaskNode as Node
from training.trainer.loading import build_task
from training.trainer.runner import TaskRunner

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_an_exported_model_loads_without_this_program(tmp_path: Path, name: str) -> None:
    """A strict `load_state_dict` of the bare model takes it, integer buffers included, with the vector's values."""
    node = Node("Normed")
    node.train(range(1, 2))

    node.runner.export(tmp_path / name, node.vector)
    path = tmp_path / name
    state = load_file(path) if name.endswith("safetensors") else torch.load(path, weights_only=True)
    fresh = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    fresh.load_state_dict(state)

    assert np.array_equal(fresh[0].bias.detach().numpy(), node.vector[:8])
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_tied_tensors_are_exported_under_every_name(tmp_path: Path) -> None:
    """safetensors refuses tensors that share memory; a loader wants both names."""
    task, spec = build_task(
        "text",
        {"layers": 1, "width": 8, "heads": 1, "context": 8},
        data_dir=__file__,
        seed=1,
        node_seed=2,
        device="cpu",
    )
    runner = TaskRunner("text", task, spec)
    vector = np.zeros(runner.model_vector.layout.total, np.float32)
    runner.model_vector.read(vector)

    runner.export(tmp_path / "m.safetensors", vector)
    state = load_file(tmp_path / "m.safetensors")

    assert torch.equal(state["bytes.weight"], state["scores.weight"])
    assert "scores.weight" not in [entry.name for entry in runner.model_vector.layout.entries]
