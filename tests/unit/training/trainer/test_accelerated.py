"""What Hugging Face's `Accelerator.prepare` returns, as `p2pnode.attach` uses it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import p2pnode
from p2pnode.training.trainer.schedule import Schedule
from p2pnode.training.trainer.script_arguments import bare_optimizer, bare_scheduler
from tests.harness.swarms.script_swarm import train_together

pytestmark = pytest.mark.usefixtures("one_thread")


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
