"""The models of the benchmark `large`, whose sizes are those of GPT-2, and the trainers that take no time."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gated_daemon import GatedTrainer
from benchmarks.gpt import Gpt, GptModel, GptOptions
from benchmarks.large import SHAPES
from benchmarks.lifecycle import WAY, memory_of, settings_of
from benchmarks.record import NotMeasured
from benchmarks.stub_daemon import SleepingTrainer
from benchmarks.vector_daemon import VectorTrainer
from training.settings import TrainingSettings
from training.trainer_link.interface import StepOrder, Trainer

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


@pytest.mark.parametrize("kind", [GatedTrainer, SleepingTrainer, VectorTrainer])
def test_the_trainers_of_benchmarks_have_all_that_a_daemon_uses(kind: type) -> None:
    """A daemon that asks for something else fails in the middle of a measurement."""
    options = {"gate": "", "parameters": 8, "seed": 0, "mean_s": 1.0, "number": 0}
    trainer = kind(TrainingSettings(options=options))
    wanted = [name for name in (*vars(Trainer), *Trainer.__annotations__) if not name.startswith("_")]

    assert [name for name in wanted if not hasattr(trainer, name)] == []


def test_the_trainer_of_lifecycle_writes_its_delta_anew_in_every_step(tmp_path: Path) -> None:
    """All of it, with the sign turned round; with `delta_on_disk` in the state directory, where nothing shows."""

    device = tmp_path.stat().st_dev

    async def scenario() -> None:
        settings = TrainingSettings(options={"parameters": 100, "seed": 3}, delta_on_disk=True)
        trainer = VectorTrainer(settings, state_dir=tmp_path)
        await trainer.start()
        before = trainer.delta.copy()
        await trainer.train(StepOrder(1, 1, 1.0, is_first=True))
        assert np.any(before)
        np.testing.assert_array_equal(trainer.delta, -before)
        assert os.fstat(trainer._shared.descriptors[1]).st_dev == device

    asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == []


def test_the_ways_of_lifecycle_are_settings() -> None:
    """Of the exchange, and of the training where they are named; anything else is refused."""
    exchange, further = settings_of(WAY)

    assert (exchange.codec, exchange.on_disk, further) == ("sparse", ["residual", "log"], {"delta_on_disk": True})
    with pytest.raises(NotMeasured, match="are no settings"):
        settings_of("codec = sparse")
    with pytest.raises(NotMeasured, match="no_such"):
        settings_of("no_such = 1")


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_the_memory_of_a_process_is_found_by_kind() -> None:
    """This one has memory of its own and of files; one that has ended has none."""
    found = memory_of(os.getpid())

    assert min(found["RssAnon"], found["RssFile"]) > 1_000_000
    assert memory_of(2**22 + 1) == {}
