"""The learning rate's schedule follows the swarm's step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from p2pnode.training.trainer.connection import ScriptWarnings
from p2pnode.training.trainer.script_arguments import ScriptArguments
from p2pnode.training.trainer_link.interface import TrainerFailed
from tests.harness.trainers.task_node import TaskNode as Node


def test_a_late_joiner_has_the_learning_rate_of_the_others() -> None:
    """A cosine schedule depends only on the swarm's step: a node that starts at step 9 has the rate of the others."""
    founder, joiner = Node("Adaptive"), Node("Adaptive")
    reports = founder.train(range(1, 10))

    (report,) = joiner.train(range(9, 10))

    assert report.metrics == reports[-1].metrics
    assert report.metrics["learning_rate"] < 0.01


def test_a_schedule_goes_back_with_the_swarm() -> None:
    """A node that resumes at an earlier step has that step's learning rate again."""
    node = Node("Adaptive")
    first, *_ = node.train(range(1, 6))

    (again,) = node.train(range(1, 2))

    assert again.metrics["learning_rate"] == pytest.approx(first.metrics["learning_rate"])


def test_a_schedule_that_has_an_end_is_left_there() -> None:
    """OneCycleLR raises when it is stepped beyond its end: one warning, and training continues."""
    node = Node("OneCycle")

    node.train(range(1, 4))

    assert node.warnings == ["schedule_over"]


def test_a_schedule_by_loss_is_refused() -> None:
    """Every node has another loss, and a schedule must be the same everywhere."""
    with pytest.raises(TrainerFailed, match="ReduceLROnPlateau") as failure:
        Node("Plateau")
    assert failure.value.fatal


def given(rate: float | Tensor) -> ScriptArguments:
    """An optimiser with this rate, and a schedule that falls from step to step."""
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=rate, foreach=False)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    return ScriptArguments.of(optimizer, schedule, None, ScriptWarnings())


def group_of(arguments: ScriptArguments) -> dict[str, Any]:
    return arguments.optimizers[0].param_groups[0]


def test_a_rate_that_is_a_tensor_stays_the_same_one() -> None:
    """A captured optimiser reads it from where it was: forwards, backwards, and after a restart it is filled."""
    arguments, numbers = given(torch.tensor(0.01)), given(0.01)
    rate = group_of(arguments)["lr"]
    for position in (60, 20):
        for one in (arguments, numbers):
            one.seek(position)
        assert group_of(arguments)["lr"] is rate
        assert float(rate) == pytest.approx(group_of(numbers)["lr"])
    saved = arguments.state()
    again = given(torch.tensor(0.01))
    rate = group_of(again)["lr"]

    again.restore(saved)

    assert group_of(again)["lr"] is rate
    assert float(rate) == pytest.approx(group_of(numbers)["lr"])


def test_a_rate_that_is_a_number_stays_one(tmp_path: Path) -> None:
    """The saved state may be of a script that captured its optimiser, and this one does not."""
    captured, plain = given(torch.tensor(0.01)), given(0.01)
    captured.seek(20)
    torch.save(captured.state(), tmp_path / "state")

    plain.restore(torch.load(tmp_path / "state"))

    assert isinstance(group_of(plain)["lr"], float)
    assert group_of(plain)["lr"] == pytest.approx(float(group_of(captured)["lr"]))
