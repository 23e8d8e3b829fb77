"""What a script gives to `attach` beside its model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, AdamW, Muon
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

import p2pnode
from p2pnode.training.trainer.connection import ScriptWarnings
from p2pnode.training.trainer.model.vector import ModelVector
from p2pnode.training.trainer.model.weight_loads import WeightLoads
from p2pnode.training.trainer.optimizers.schedule import Schedule
from p2pnode.training.trainer.script_arguments import ScriptArguments, bare_optimizer, bare_scheduler, require_model
from p2pnode.training.trainer_link.interface import TrainerFailed
from p2pnode.training.trainer_link.messages import FromTrainer
from tests.harness.swarms.script_swarm import train_together


def silent(*_: str) -> None:
    pass


def of(optimizer: Any, scheduler: Any = None, scaler: Any = None, own: Any = None) -> ScriptArguments:
    return ScriptArguments.of(optimizer, scheduler, scaler, silent, own)


def told(warnings: ScriptWarnings) -> list[Any]:
    found: list[FromTrainer] = []
    warnings.flush(found.append)
    return found


def test_a_late_joiner_has_the_rates_of_each_optimiser() -> None:
    """Each schedule moves its own optimiser, in whatever order they are given."""
    net = nn.Linear(4, 4)
    muon, adamw = Muon([net.weight], lr=0.02), AdamW([net.bias], lr=0.1)
    schedules = [LinearLR(adamw, 0.5, 1.0, 10), CosineAnnealingLR(muon, 100)]

    given = of([muon, adamw], schedules)
    given.seek(10)

    assert adamw.param_groups[0]["lr"] == pytest.approx(0.1)
    twin = Muon([nn.Linear(4, 4).weight], lr=0.02)
    schedule = CosineAnnealingLR(twin, 100)
    for _ in range(10):
        twin.step()
        schedule.step()
    assert muon.param_groups[0]["lr"] == pytest.approx(twin.param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("each_turn", "is_found"),
    [(0, True), (1, True), (2, False), (4, False), (8, False), (9, True)],
    ids=["never", "by-epoch", "half", "each-step", "twice", "each-micro-batch"],
)
def test_a_schedule_that_does_not_count_optimiser_steps_is_found(each_turn: int, is_found: bool) -> None:
    """The swarm moves it on at each of them, so that one by epochs would fall within seconds. It is told once."""
    optimizer = SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    schedule = StepLR(optimizer, 100)
    given, warnings = of(optimizer, schedule), ScriptWarnings()

    for turn in range(6):
        given.seek(4 * turn)
        optimizer.step()
        for _ in range(each_turn):
            schedule.step()
        given.end_turn(4, warnings)

    assert [one.message for one in told(warnings)] == is_found * [
        f"the script has stepped the schedule StepLR {each_turn} times in 4 optimiser steps, "
        "but the swarm moves it on once in each"
    ]


def test_a_schedule_that_is_stepped_after_the_swarm_is_no_finding() -> None:
    """Turns of one optimiser step: the first of them ends before the script has stepped its schedule."""
    optimizer = SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    schedule = StepLR(optimizer, 100)
    given, warnings = of(optimizer, schedule), ScriptWarnings()

    given.seek(0)
    for turn in range(1, 9):
        optimizer.step()
        given.end_turn(1, warnings)
        given.seek(turn)
        schedule.step()

    assert told(warnings) == []


def test_a_schedule_goes_back_although_a_group_was_added() -> None:
    """As when layers are unfrozen: the new group keeps its rate, which no beginning is known of."""
    optimizer = SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    given = of(optimizer, StepLR(optimizer, 2))
    given.seek(4)
    optimizer.add_param_group({"params": nn.Linear(2, 2).parameters(), "lr": 0.5})

    given.seek(2)

    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(0.1), pytest.approx(0.05)]


def test_lbfgs_goes_on_from_weights_that_were_loaded() -> None:
    """Its history is of other positions: with it the loss rose to 10^6 in one of the turns."""
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    inputs = torch.rand(64, 2) * 2 - 1
    targets = torch.sin(3 * inputs[:, :1]) * inputs[:, 1:]
    optimizer = LBFGS(net.parameters())
    vector = ModelVector(net)
    loads = WeightLoads(vector, of(optimizer).optimizers)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(inputs), targets)
        loss.backward()
        return loss.detach()

    for _ in range(4):
        before = closure()
        optimizer.step(closure)
        optimizer.step(closure)
        assert closure() < 0.1 * before
        with torch.no_grad(), loads.load():
            for parameter in net.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.3)


def test_a_schedule_of_schedules_belongs_to_its_optimiser() -> None:
    """As PyTorch's chains, of which one has no optimiser of its own."""
    optimizer, other = SGD(nn.Linear(2, 2).parameters(), lr=1.0), SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    warm_up, rest = LinearLR(optimizer, 0.1, 1.0, 5), ConstantLR(optimizer, 0.5, 5)

    for schedule in (SequentialLR(optimizer, [warm_up, rest], [5]), ChainedScheduler([warm_up, rest])):
        given = of([other, optimizer], schedule)
        given.seek(3)
        assert optimizer.param_groups[0]["lr"] != 1.0 == other.param_groups[0]["lr"]


def test_what_was_saved_is_restored_for_each() -> None:
    """Another number of optimisers or schedules than was saved does not fit."""
    net = nn.Linear(4, 4)

    def made() -> ScriptArguments:
        muon, adamw = Muon([net.weight], lr=0.02), AdamW([net.bias], lr=0.1)
        return of([muon, adamw], [LinearLR(adamw, 0.5, 1.0, 10)], torch.amp.GradScaler("cpu"))

    first, second = made(), made()
    net(torch.ones(2, 4)).sum().backward()
    for optimizer in first.optimizers:
        optimizer.step()
    first.advance()

    second.restore(first.state())

    assert second.optimizers[0].state[net.weight]["momentum_buffer"].abs().sum() > 0
    assert second.optimizers[1].state[net.bias]["exp_avg"].abs().sum() > 0
    assert second.schedules[0].position == 1
    with pytest.raises(ValueError, match="argument 2"):
        of([first.optimizers[0]]).restore(first.state())


class Overlapping(SGD):
    """As `ZeroRedundancyOptimizer` with `overlap_with_ddp=True`."""

    _overlap_with_ddp = True


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "scaler", "own", "reason"),
    [
        (None, None, None, None, "there is no optimiser"),
        ([], None, None, None, "there is no optimiser"),
        (Overlapping(nn.Linear(2, 2).parameters(), lr=1.0), None, None, None, "Overlapping with overlap_with_ddp=True"),
        (nn.Linear(2, 2), None, None, None, "Linear was given as an optimiser"),
        (SGD, None, None, None, "the class SGD was given as an optimiser"),
        (nn.Linear(2, 2).parameters(), None, None, None, "generator was given as an optimiser: it has no param_groups"),
        ("good", 0.1, None, None, "float was given as a schedule of the learning rate: it has no step"),
        ("good", "other", None, None, "ConstantLR was made for another optimiser"),
        ("good", None, 0.1, None, "float was given as a torch.amp.GradScaler"),
        ("good", None, None, [1], "list was given as state"),
    ],
)
def test_anything_else_is_named(optimizer: Any, scheduler: Any, scaler: Any, own: Any, reason: str) -> None:
    """With the call as it should be, and not with an `AttributeError` of ours."""
    good, other = SGD(nn.Linear(2, 2).parameters(), lr=1.0), SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    optimizer = good if optimizer == "good" else optimizer
    scheduler = ConstantLR(other) if scheduler == "other" else scheduler

    with pytest.raises(TrainerFailed, match=reason) as caught:
        of(optimizer, scheduler, scaler, own)

    assert caught.value.fatal


def test_a_model_is_a_module() -> None:
    """Model and optimiser in the wrong order are the commonest slip."""
    with pytest.raises(TrainerFailed, match=r"the model is SGD, not a torch\.nn\.Module"):
        require_model(SGD(nn.Linear(2, 2).parameters(), lr=1.0))
    require_model(nn.Linear(2, 2))


def optimized() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def wrapper(name: str, **attributes: Any) -> Any:
    """An object of a class that looks like one of Accelerate's."""
    kind = type(name, (SimpleNamespace,), {"__module__": "accelerate.wrappers"})
    return kind(**attributes)


def test_what_accelerate_did_not_wrap_is_used_as_it_is() -> None:
    """It has no scaler then, and its schedule counts optimiser steps."""
    _, optimizer, scheduler = optimized()

    assert bare_optimizer(optimizer) == (optimizer, None)
    assert bare_scheduler(scheduler) == (scheduler, 1)


@pytest.mark.parametrize(("together", "split", "stride"), [(True, False, 4), (True, True, 1), (False, False, 1)])
def test_a_wrapped_scheduler_steps_once_per_process(together: bool, split: bool, stride: int) -> None:
    """Unless batches are split over the processes, or the schedule is not tied to the optimiser."""
    _, optimizer, scheduler = optimized()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    outer = wrapper(
        "AcceleratedOptimizer",
        optimizer=optimizer,
        scaler=scaler,
        accelerator_state=SimpleNamespace(num_processes=4),
    )
    schedule = wrapper(
        "AcceleratedScheduler",
        scheduler=scheduler,
        optimizers=[outer],
        step_with_optimizer=together,
        split_batches=split,
    )

    assert bare_optimizer(outer) == (optimizer, scaler)
    assert bare_scheduler(schedule) == (scheduler, stride)


def test_a_schedule_with_a_stride_is_moved_by_optimiser_steps() -> None:
    """With four processes a late joiner at optimiser step 3 has made twelve steps of its scheduler."""
    _, optimizer, scheduler = optimized()
    schedule = Schedule(optimizer, scheduler, lambda event, text: None, stride=4)

    schedule.seek(3)

    assert schedule.position == 3
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5**12)


def test_a_loop_with_accelerate_trains_in_two_nodes(tmp_path: Path) -> None:
    """The real package: accumulation, bfloat16 and a schedule; both nodes end with one model."""
    accelerate = pytest.importorskip("accelerate", reason="make test-frameworks installs it")

    # It keeps one state per process, and other tests have used it.
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)

    def script(number: int) -> Any:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
        torch.manual_seed(number)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        inputs = torch.randn(64, 4)
        data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
        model, optimizer, schedule, data = accelerator.prepare(model, optimizer, schedule, data)
        swarm = p2pnode.attach(model, optimizer, schedule)
        while not swarm.done:
            for points, target in data:
                with accelerator.accumulate(model):
                    loss = nn.functional.mse_loss(model(points), target)
                    accelerator.backward(loss)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    swarm.step(samples=16, loss=loss)
                if swarm.done:
                    break
        return model

    together = train_together(
        {"n0": lambda: script(0), "n1": lambda: script(1)}, tmp_path, 6, **{"training.local_steps": 3}
    )

    first, second = together.results.values()
    assert all(torch.equal(one, two) for one, two in zip(first.parameters(), second.parameters(), strict=True))
    reports = together.trainers["n0"].reports
    assert [report.optimizer_steps for report in reports] == [3] * 6
    assert reports[-1].loss < reports[0].loss
    rates = [report.metrics["learning_rate"] for report in reports]
    assert rates == pytest.approx([0.1 * 0.99 ** (3 * turn) for turn in range(1, 7)])
