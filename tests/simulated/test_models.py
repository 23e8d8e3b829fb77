"""Models and loops as people have them, each in two nodes that call `p2pnode.attach`.

Together they train as one process would on the data of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import p2pnode
from tests.harness.runner.long_run import more
from tests.harness.swarms.script_swarm import Together, train_together

STEPS = 8
ROWS = 16

#: Deltas are averaged as they are, so that two half batches of plain SGD are one whole batch.
AVERAGED = {"exchange.outer_lr": 1.0, "exchange.outer_momentum": 0.0, "training.local_steps": 1}


def inputs_of(step: int) -> tuple[Tensor, Tensor]:
    """The joined batch of a step: inputs (ROWS, 4), outputs (ROWS, 4)."""
    inputs = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(step))
    return inputs, torch.roll(inputs, 1, dims=1).sin()


@dataclass
class Kind:
    """What differs between the models: how the model is built and wrapped, and its groups of parameters."""

    build: Callable[[], nn.Module]
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    groups: Callable[[nn.Module], Any] = lambda model: [value for value in model.parameters() if value.requires_grad]
    accumulate: int = 1


def train(kind: Kind, rows: slice, steps: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
    """The script: in a node until the swarm is done, or alone for `steps`. The model, and its weights at the start."""
    torch.manual_seed(3)
    model = kind.build()
    optimizer = torch.optim.SGD(kind.groups(model), lr=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wrapped = kind.wrap(model)
    swarm = None if steps else p2pnode.attach(wrapped, optimizer)
    step = 0
    while swarm is None or not swarm.done:
        inputs, outputs = (value[rows] for value in inputs_of(step))
        optimizer.zero_grad()
        for part in range(kind.accumulate):
            half = slice(part, None, kind.accumulate)
            (functional.mse_loss(wrapped(inputs[half]), outputs[half]) / kind.accumulate).backward()
        optimizer.step()
        step += 1
        if swarm is not None:
            swarm.step(samples=len(inputs))
        elif step == steps:
            break
    return model, before


class LowRank(nn.Module):
    """A frozen linear layer with a trained update of rank 2, as LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, 4) * 0.5)
        self.up = nn.Parameter(torch.zeros(4, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + inputs @ self.down.T @ self.up.T


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def frozen_first() -> nn.Module:
    model = plain()
    model[0].requires_grad_(False)
    return model


def tied() -> nn.Module:
    model = plain()
    model[2].weight = model[0].weight
    return model


def compiled(model: nn.Module) -> nn.Module:
    # The compiler's front end alone: its code generator takes 20 s, and what it makes is not the subject here.
    return torch.compile(model, backend="eager")


def two_rates(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": model[0].parameters(), "lr": 0.02},
        {"params": [model[2].weight]},
        {"params": [model[2].bias], "lr": 0},
    ]


KINDS = {
    "plain": Kind(plain),
    "compiled": Kind(plain, wrap=compiled),
    "frozen": Kind(frozen_first),
    "low rank": Kind(lambda: nn.Sequential(LowRank(), nn.Tanh(), LowRank())),
    "tied": Kind(tied),
    "groups": Kind(plain, groups=two_rates),
    "accumulated": Kind(plain, accumulate=4),
}


def in_two_nodes(script: Callable[[slice], Any], folder: Path, **settings: Any) -> Together:
    """One script per node, each with every second row of the joined batch."""
    scripts = {f"n{part}": (lambda part=part: script(slice(part, None, 2))) for part in range(2)}
    return train_together(scripts, folder, **{"steps": STEPS, **AVERAGED, **settings})


#: It needs torch's compiler, whose import takes three seconds.
COMPILED = "compiled"


@pytest.mark.parametrize("name", [*(name for name in KINDS if name != COMPILED), *more(COMPILED)])
def test_two_nodes_train_as_one_process_on_both_batches(name: str, tmp_path: Path) -> None:
    """Both nodes end with the weights of a bare loop on the joined batches, to 1e-6; what is frozen stays as it was."""
    kind = KINDS[name]

    together = in_two_nodes(lambda rows: train(kind, rows), tmp_path)

    (first, before), (second, _) = together.results.values()
    alone, _ = train(kind, slice(None), STEPS)
    trained = {name for name, value in first.named_parameters() if value.requires_grad}
    expected = alone.state_dict()
    for key, value in first.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=1e-6)
        assert torch.equal(value, second.state_dict()[key])
        if key not in trained and name != "tied":
            assert torch.equal(value, before[key])
    assert any(not torch.equal(first.state_dict()[key], before[key]) for key in trained)
    assert {entry.name for entry in together.trainers["n0"].layout.entries} <= trained
    once = {value.data_ptr(): value.numel() for key, value in first.named_parameters() if value.requires_grad}
    assert together.value.size == sum(once.values())


def test_a_group_without_a_rate_stays_and_tied_weights_stay_tied(tmp_path: Path) -> None:
    """What the swarm loads respects what the model and its optimiser mean."""
    (still, before), _ = in_two_nodes(lambda rows: train(KINDS["groups"], rows), tmp_path).results.values()
    (joined, _), _ = in_two_nodes(lambda rows: train(KINDS["tied"], rows), tmp_path).results.values()

    assert torch.equal(still[2].bias, before["2.bias"])
    assert joined[0].weight is joined[2].weight


def learn(
    rows: slice, build: Callable[[], nn.Module], *, autocast: bool = False, scaler: bool = False, until: int = 1000
) -> dict[str, Any]:
    """A loop with mixed precision, until the swarm is done. Its steps from `until` on change no weight."""
    torch.manual_seed(3)
    model = build()
    dtype = next(model.parameters()).dtype
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = torch.amp.GradScaler("cpu", init_scale=2.0**126, enabled=True) if scaler else None
    swarm = p2pnode.attach(model, optimizer, scaler=scale)
    calls, seen = 0, set()
    while not swarm.done:
        inputs, outputs = (value[rows] for value in inputs_of(calls))
        optimizer.param_groups[0]["lr"] = 0.1 if calls < until else 0.0
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = model(inputs.to(dtype))
        seen.add(found.dtype)
        loss = functional.mse_loss(found.float(), outputs) * (100 if scaler else 1)
        if scale is None:
            loss.backward()
            optimizer.step()
        else:
            scale.scale(loss).backward()
            scale.step(optimizer)
            scale.update()
        calls += 1
        swarm.step(samples=len(inputs), loss=loss)
    return {"model": model, "calls": calls, "dtypes": seen}


def test_autocast_to_bfloat16_keeps_the_shared_weights_in_float32(tmp_path: Path) -> None:
    """The products are bfloat16, the weights and their exchange float32; the loss falls, and the nodes agree."""
    together = in_two_nodes(lambda rows: learn(rows, plain, autocast=True), tmp_path)

    first, second = (result["model"] for result in together.results.values())
    assert together.results["n0"]["dtypes"] == {torch.bfloat16}
    assert all(value.dtype == torch.float32 for value in first.parameters())
    assert all(torch.equal(one, two) for one, two in zip(first.parameters(), second.parameters(), strict=True))
    losses = [report.loss for report in together.trainers["n0"].reports]
    assert losses[-1] < losses[0]


def test_weights_in_bfloat16_are_shared_without_drift(tmp_path: Path) -> None:
    """The owners keep float32, the nodes its rounding, and steps without a change push nothing of it to the owners."""
    together = in_two_nodes(lambda rows: learn(rows, lambda: plain().bfloat16(), until=4), tmp_path)

    models = [result["model"] for result in together.results.values()]
    entries = together.trainers["n0"].layout.entries
    for model in models:
        held = dict(model.named_parameters())
        for entry in entries:
            value = torch.from_numpy(together.value[entry.offset : entry.offset + entry.size]).view(entry.shape)
            assert torch.equal(held[entry.name], value.bfloat16())
    exact = torch.from_numpy(together.value)
    assert not torch.equal(exact, exact.bfloat16().float())
    losses = [report.loss for report in together.trainers["n0"].reports]
    assert losses[-1] < losses[0]


def test_a_step_that_the_scaler_skips_is_not_a_step_of_the_swarm(tmp_path: Path) -> None:
    """A scale that is too high costs calls, not steps: every turn has its steps, and the weights are finite."""
    together = in_two_nodes(lambda rows: learn(rows, plain, scaler=True), tmp_path)

    for name, trainer in together.trainers.items():
        assert [report.optimizer_steps for report in trainer.reports] == [1] * STEPS
        assert together.results[name]["calls"] > STEPS
    assert np.isfinite(together.value).all()


def test_batch_normalisation_has_one_set_of_statistics(tmp_path: Path) -> None:
    """Running means and variances are those of both nodes' data; the counter of batches is each node's own."""

    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4))

    together = in_two_nodes(lambda rows: learn(rows, normed), tmp_path)

    first, second = (result["model"][1] for result in together.results.values())
    assert torch.equal(first.running_mean, second.running_mean)
    assert torch.equal(first.running_var, second.running_var)
    assert (first.running_var > 0).all()
    assert not torch.equal(first.running_var, torch.ones(4))
    assert first.num_batches_tracked == together.results["n0"]["calls"]


def test_between_two_steps_of_a_turn_the_shared_weights_can_be_seen(tmp_path: Path) -> None:
    """In `shared_weights` both nodes hold the same weights in the middle of a turn, and each its own again after it."""

    def script(rows: slice) -> list[tuple[Tensor, Tensor, Tensor]]:
        torch.manual_seed(3)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        swarm = p2pnode.attach(model, optimizer)
        seen = []
        while not swarm.done:
            inputs, outputs = (value[rows] for value in inputs_of(len(seen)))
            optimizer.zero_grad()
            functional.mse_loss(model(inputs), outputs).backward()
            optimizer.step()
            swarm.step()
            before = model.weight.detach().clone()
            with swarm.shared_weights():
                shared = model.weight.detach().clone()
            seen.append((before, shared, model.weight.detach().clone()))
        return seen

    together = in_two_nodes(script, tmp_path, **{"training.local_steps": 3})

    for (own, shared, after), (_, its_shared, _) in zip(*together.results.values(), strict=True):
        assert torch.equal(own, after)
        assert torch.equal(shared, its_shared)
    middle = together.results["n0"][0], together.results["n1"][0]
    assert not torch.equal(middle[0][0], middle[1][0])
    assert not torch.equal(middle[0][0], middle[0][1])
