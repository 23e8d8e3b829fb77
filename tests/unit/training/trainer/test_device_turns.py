"""What a script does as one of several trainers of its node, and that a single one does nothing of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from p2pnode.training.trainer import device_turns
from p2pnode.training.trainer.device_turns import DeviceTurns
from p2pnode.training.trainer.model.vector import ModelVector
from p2pnode.training.trainer_link.interface import StepOrder, Vector
from p2pnode.training.trainer_link.messages import StepAnswer


def turns() -> tuple[DeviceTurns, nn.Linear]:
    model = nn.Linear(2, 1)
    connection: Any = SimpleNamespace(next_step=lambda: StepAnswer.LOCAL)
    return DeviceTurns(ModelVector(model), connection), model


def order(**fields: Any) -> StepOrder:
    return StepOrder(1, 4, 1.0, is_first=False, **fields)


def values(model: nn.Linear) -> list[float]:
    return [float(value) for parameter in model.parameters() for value in parameter.detach().reshape(-1)]


def test_a_single_trainer_asks_nobody() -> None:
    """Before an order, and with one that does not ask; its turn begins with the vector."""
    found, model = turns()
    vector, delta = np.array([1.0, 2.0, 3.0], np.float32), np.full(3, 4.0, np.float32)
    assert (found.order.asks, found.order.done, found.recent_loss()) == (False, 0, None)
    assert found.next_step(is_due=False) is StepAnswer.LOCAL
    assert found.next_step(is_due=True) is StepAnswer.DISTRIBUTED
    found.begin()
    found.stepped(1.0)
    found.load(vector, delta)
    assert sorted(values(model)) == [1.0, 2.0, 3.0]


def test_losses_are_kept_where_they_are_asked_for() -> None:
    """As many as the window, all finite; tensors too. With fewer there is no mean."""
    found, _ = turns()
    found.order = order(asks=True, loss_window=0)
    found.stepped(9.0)
    found.order = order(asks=True, loss_window=2)
    found.stepped(1.0)
    assert found.recent_loss() is None
    found.stepped(torch.tensor(2.0))
    assert found.recent_loss() == 1.5
    found.stepped(float("nan"))
    assert found.recent_loss() is None
    assert found.next_step(is_due=True) is StepAnswer.LOCAL


NODE, SWARM = np.full(3, 8.0, np.float32), np.full(3, 16.0, np.float32)


def pulled(local: float, glob: float, *leaders: Vector, dtype: torch.dtype = torch.float32) -> list[float]:
    """A model whose values are 0, after one optimiser step."""
    model = nn.Linear(2, 1).to(dtype)
    found = DeviceTurns(ModelVector(model), None)
    found.follow(leaders)
    found.order = order(local_pull=local, global_pull=glob)
    found.load(np.zeros(3, np.float32), np.zeros(3, np.float32))
    found.begin()
    found.stepped(1.0)
    return values(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_pull_to_the_leader_of_the_swarm_is_first(dtype: torch.dtype) -> None:
    """A half of the way to 16, and from 8 a quarter to 8; alone each goes its share."""
    assert pulled(0.25, 0.5, NODE, SWARM, dtype=dtype) == [8.0] * 3
    assert pulled(0.5, 0.5, np.zeros(3, np.float32), SWARM, dtype=dtype) == [4.0] * 3
    assert pulled(0.25, 0.0, NODE, SWARM, dtype=dtype) == [2.0] * 3
    assert pulled(0.0, 0.25, NODE, SWARM, dtype=dtype) == [4.0] * 3


def test_without_a_share_or_without_leaders_nothing_is_pulled() -> None:
    """A trainer that follows nobody has none; with a share of 1 it is where the leader is."""
    assert pulled(0.0, 0.0, NODE, SWARM) == [0.0] * 3
    assert pulled(0.5, 0.5) == [0.0] * 3
    assert pulled(0.5, 0.5, NODE) == [4.0] * 3
    assert pulled(1.0, 0.0, NODE, SWARM) == [8.0] * 3


def test_the_pulls_of_a_turn_are_forgotten_with_it() -> None:
    """What a leader does during a turn counts in the next."""
    found, model = turns()
    found.follow((NODE,))
    for share in (1.0, 0.0):
        found.order = order(local_pull=share)
        found.begin()
    before = values(model)
    found.stepped(1.0)

    assert values(model) == before


def test_a_trainer_asks_when_its_device_has_done_all_but_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step is launched while the device takes the one before; a third is not asked for."""
    said: list[str] = []

    class Mark:
        def __init__(self, _device: torch.device) -> None:
            self.name = str(sum("launched" in word for word in said))
            said.append(f"launched {self.name}")

        def synchronize(self) -> None:
            said.append(f"waited for {self.name}")

    found, _ = turns()
    found.order = order(asks=True)
    monkeypatch.setattr(device_turns, "_mark", Mark)
    for _ in range(3):
        found.next_step(is_due=True)
        said.append("asked")

    assert said == [
        *("launched 0", "asked"),
        *("launched 1", "waited for 0", "asked"),
        *("launched 2", "waited for 1", "asked"),
    ]
