"""The models of the benchmark `large`, whose sizes are those of GPT-2, and the trainers that take no time."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gated_daemon import GatedTrainer
from benchmarks.gpt import Gpt, GptModel, GptOptions
from benchmarks.large import SHAPES
from benchmarks.stub_daemon import SleepingTrainer
from p2pnode.training.settings import TrainingSettings
from p2pnode.training.trainer_link.interface import Trainer

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


@pytest.mark.parametrize("kind", [GatedTrainer, SleepingTrainer])
def test_the_trainers_of_benchmarks_have_all_that_a_daemon_uses(kind: type) -> None:
    """A daemon that asks for something else fails in the middle of a measurement."""
    options = {"gate": "", "parameters": 8, "seed": 0, "mean_s": 1.0, "number": 0}
    trainer = kind(TrainingSettings(options=options))
    wanted = [name for name in (*vars(Trainer), *Trainer.__annotations__) if not name.startswith("_")]

    assert [name for name in wanted if not hasattr(trainer, name)] == []
