"""What a restored script is told about settings that were others when its state was saved."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from p2pnode.training.trainer.model.unshared_tensors import UnsharedTensors
from p2pnode.training.trainer.model.vector import ModelVector
from p2pnode.training.trainer.model.weight_loads import WeightLoads
from p2pnode.training.trainer.sampling.shared_data import SharedData
from p2pnode.training.trainer.script_arguments import ScriptArguments
from p2pnode.training.trainer.state import snapshot
from p2pnode.training.trainer.state.script_state import ScriptState


class Script:
    """A script's optimiser and schedule, and what it was warned of."""

    def __init__(self, lr: float, *, scheduled: bool = False) -> None:
        self.warned: list[tuple[str, str]] = []
        model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        self.scheduler = StepLR(self.optimizer, 1, gamma=0.1) if scheduled else None
        given = ScriptArguments.of(self.optimizer, self.scheduler, None, lambda *_: None)
        data = cast(SharedData, SimpleNamespace(state=dict, restore=lambda _state: None))
        loads = WeightLoads(ModelVector(model), given.optimizers)
        self.state = ScriptState(
            given, UnsharedTensors({}, {}), data, loads, lambda event, text: self.warned.append((event, text))
        )

    def saved(self, path: Path, local_steps: int) -> Path:
        for _ in range(3):
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
        content: dict[str, Any] = self.state.content(64, local_steps)
        snapshot.write(path, snapshot.content_of(content))
        return path

    def restored(self, path: Path, local_steps: int) -> int:
        return self.state.restore(snapshot.load(path), path, local_steps)


@pytest.mark.parametrize("scheduled", [False, True])
def test_another_learning_rate_than_the_restored_one_is_said(tmp_path: Path, scheduled: bool) -> None:
    """The restored one is used. What a schedule has made of the same rate is no difference."""
    file = Script(0.01, scheduled=scheduled).saved(tmp_path / "state", 5)
    other, same = Script(0.1, scheduled=scheduled), Script(0.01, scheduled=scheduled)

    assert other.restored(file, 5) == same.restored(file, 5) == 64

    ((event, text),) = other.warned
    assert event == "learning_rate_restored"
    assert "asks for lr = 0.1" in text
    assert "has 0.01" in text
    assert same.warned == []
    assert other.optimizer.param_groups[0]["lr"] == same.optimizer.param_groups[0]["lr"]


def test_another_number_of_local_steps_is_said(tmp_path: Path) -> None:
    """The learning rate's schedule, for one, is at another place then."""
    file = Script(0.1).saved(tmp_path / "state", 5)
    script = Script(0.1)

    script.restored(file, 10)

    ((event, text),) = script.warned
    assert event == "local_steps_changed"
    assert "was 5" in text
    assert "is 10" in text
