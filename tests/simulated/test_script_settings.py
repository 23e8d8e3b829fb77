"""What a script reports and is given: its evaluations, its seed, and the model's file at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import nn
from torch.nn import functional

import p2pnode
from tests.harness.swarms.script_swarm import Together, train_together


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def script(place: int, look: Callable[[Any, nn.Module], None], batches: int = 1) -> Callable[[], Any]:
    """A loop on data of its own; `look` is called at the beginning of every turn."""

    def main() -> Any:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        swarm = p2pnode.attach(model, optimizer)
        generator = torch.Generator().manual_seed(place)
        while not swarm.done:
            look(swarm, model)
            for _ in range(swarm.local_steps):
                for _ in range(batches):  # a node with more counts more of them in its BatchNorm
                    inputs = torch.randn(8, 4, generator=generator)
                    functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True)).backward()
                optimizer.step()
                optimizer.zero_grad()
                swarm.step(samples=8)
        look(swarm, model)
        return model.state_dict(), swarm.seed, swarm.device, swarm.options, swarm.data_dir

    return main


def warned(trained: Together, name: str) -> list[str]:
    return [message.event for message in trained.trainers[name].heard if hasattr(message, "event")]


def test_until_ends_a_script_by_its_own_evaluations_and_all_nodes_write_its_model(tmp_path: Path) -> None:
    """Of two scripts one evaluates: the run ends on both at the second model that is good enough. Their files are
    the same bytes, load strictly, and hold the weights that both scripts have when they are done."""

    def evaluate(swarm: Any, _model: nn.Module) -> None:
        swarm.evaluate(accuracy=torch.tensor(0.5 + swarm.step_number / 10), samples=20)

    trained = train_together(
        {"n0": script(0, evaluate), "n1": script(1, lambda *_: None, batches=3)},
        tmp_path,
        steps=0,
        **{"training.until": "accuracy>=0.9", "training.local_steps": 2},
    )

    hosts = trained.swarm.hosts
    steps = [hosts[name].node.progress.step for name in ("n0", "n1")]
    assert max(steps) <= 7
    files = {hosts[name].disk.files["model.safetensors"] for name in hosts}
    assert len(files) == 1
    fresh = build()
    fresh.load_state_dict(load(files.pop()), strict=True)
    for name in ("n0", "n1"):
        for key, value in trained.results[name][0].items():
            if value.is_floating_point():
                assert torch.equal(value, fresh.state_dict()[key]), (name, key)
    result = hosts["n0"].node.result
    assert result is not None
    assert (result.end, result.best.metric) == ("until", "accuracy")
    assert hosts["n0"].node.progress.evaluated_samples == 20


def test_an_evaluation_of_a_nodes_own_weights_is_warned_of_once(tmp_path: Path) -> None:
    """In the middle of a turn the weights are not the shared ones, unless inside `shared_weights`."""

    def main() -> None:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        swarm = p2pnode.attach(model, optimizer)
        swarm.evaluate(loss=1)
        optimizer.step()
        swarm.step()
        with swarm.shared_weights():
            swarm.evaluate(loss=1)
        quiet = len(swarm._turns.warn._pending)
        swarm.evaluate(loss=1)
        swarm.evaluate(loss=1)
        loud = len(swarm._turns.warn._pending)
        for wrong in ({}, {"loss": "low"}, {"loss": torch.zeros(2)}):
            with pytest.raises(ValueError, match=r"swarm\.evaluate\("):
                swarm.evaluate(**wrong)
        while not swarm.done:
            optimizer.step()
            swarm.step()
        assert (quiet, loud) == (0, 1)

    trained = train_together({"n0": main}, tmp_path, steps=2, **{"training.local_steps": 3})

    assert trained.trainers["n0"].error == ""
    assert "own_weights_evaluated" in warned(trained, "n0")


def test_a_script_is_given_seed_device_options_and_folder(tmp_path: Path) -> None:
    """They have no other effect under `p2pnode run`; `auto` is resolved to what torch takes."""
    trained = train_together({"n0": script(0, lambda *_: None)}, tmp_path, steps=1)

    _, seed, device, options, data_dir = trained.results["n0"]

    assert seed == 0  # the harness gives none; `derive_start_seed` is tested with the messages
    assert str(torch.zeros(1, device=device).device) == str(torch.device(device))
    assert (options, data_dir) == ({}, "")


def test_a_script_sees_the_shared_values_that_have_entered(tmp_path: Path) -> None:
    """Alone, where a turn begins, they are what it has trained, and an evaluation is of the step before."""
    plain_sum = {"exchange.weight": "sum", "exchange.outer_lr": 1.0, "exchange.outer_momentum": 0.0}
    begins: list[torch.Tensor] = []
    shared: list[torch.Tensor] = []

    def look(swarm: Any, model: nn.Module) -> None:
        begins.append(model[0].weight.detach().clone())
        with swarm.shared_weights():
            shared.append(model[0].weight.detach().clone())
            if swarm.step_number == 3:
                swarm.evaluate(inside=1)

    settings = {"barrier.method": "asp", "training.local_steps": 2, **plain_sum}
    trained = train_together({"n0": script(0, look)}, tmp_path, steps=6, **settings)

    assert warned(trained, "n0") == []
    assert trained.swarm.of("evaluated")[0].fields["step"] == 2
    for begin, known in zip(begins, shared, strict=True):
        assert torch.allclose(begin, known, atol=1e-6)
    assert not torch.allclose(begins[0], begins[-1], atol=1e-3)
