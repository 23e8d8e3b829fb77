"""The models of the benchmark `large`: their sizes are those of GPT-2."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpt import Gpt, GptModel, GptOptions
from benchmarks.large import SHAPES

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize(("millions", "parameters"), [(124.0, 124_439_808), (355.0, 354_823_168)])
def test_the_shapes_are_gpt_2_s(millions: float, parameters: int) -> None:
    """Tied embedding, positions, blocks and norms have as many parameters as the published models."""
    layers, width, _ = SHAPES[millions]
    with torch.device("meta"):
        model = GptModel(GptOptions(layers=layers, width=width))

    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_the_model_learns_from_its_tokens_alone() -> None:
    """A loss that depends on every parameter, of tokens that the node's seed decides."""
    task = Gpt({"layers": 1, "width": 64, "tokens": 4}, data_dir="", seed=1, node_seed=2, device="cpu")
    spec = task.build()
    batch = next(task.batches())
    task.loss(spec.model, batch).backward()

    assert batch.tolist() == next(task.batches()).tolist()
    assert all(parameter.grad is not None for parameter in spec.model.parameters())
