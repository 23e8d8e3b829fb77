"""What a script does as one of several trainers of its node, and that a single one does nothing of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from p2pnode.training.trainer.device_turns import DeviceTurns, refuse_ranks
from p2pnode.training.trainer.vector import ModelVector
from p2pnode.training.trainer_link.interface import StepOrder, TrainerFailed
from p2pnode.training.trainer_link.messages import Start
from p2pnode.training.trainer_link.step_messages import StepAnswer


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
    assert (found.asks, found.done, found.recent_loss()) == (False, 0, None)
    found.begin()
    found.stepped(1.0)
    found.load(vector, delta)
    assert sorted(values(model)) == [1.0, 2.0, 3.0]
    assert found.known_step == 0
    found.ordered(order(done=2))
    assert (found.asks, found.done) == (False, 2)


def test_losses_are_kept_where_they_are_asked_for() -> None:
    """As many as the window; tensors too."""
    found, _ = turns()
    found.ordered(order(asks=True, loss_window=0))
    found.stepped(9.0)
    found.ordered(order(asks=True, loss_window=2))
    found.stepped(1.0)
    assert found.recent_loss() is None
    found.stepped(torch.tensor(2.0))
    assert found.recent_loss() == 1.5
    assert found.next_step() is StepAnswer.LOCAL


def test_after_a_step_the_model_is_pulled_to_the_leader() -> None:
    """From the moment at which the turn's weights were loaded."""
    found, model = turns()
    found.follow((np.full(3, 8.0, np.float32),))
    found.ordered(order(asks=True, local_pull=0.5))
    found.load(np.zeros(3, np.float32), np.zeros(3, np.float32))
    found.begin()
    found.stepped(1.0)

    assert values(model) == [4.0] * 3


def test_a_turn_s_delta_is_written_or_kept() -> None:
    """Kept for a merge it is not written, and a bad one is said."""
    found, model = turns()
    delta = np.full(3, -1.0, np.float32)
    for keeps in (False, True):
        found.ordered(order(asks=True, keeps_delta=keeps))
        found.load(np.zeros(3, np.float32), np.zeros(3, np.float32))
        with torch.no_grad():
            model.weight += 2.0
            model.bias += float("nan") if keeps else 2.0
        assert found.report(delta) is not keeps
        assert delta.tolist() == [2.0] * 3


@pytest.mark.parametrize(("devices", "ranks", "refused"), [(1, 2, False), (2, 1, False), (2, 2, True)])
def test_a_script_with_ranks_of_its_own_has_one_device_of_its_node(devices: int, ranks: int, refused: bool) -> None:
    """Two ways to use several GPUs at once are refused for good."""
    start = Start("t", "", {}, "cpu", 1, 0, 0, 4, device_count=devices)
    if not refused:
        refuse_ranks(start, ranks)
        return
    with pytest.raises(TrainerFailed, match="ranks of its own") as failed:
        refuse_ranks(start, ranks)
    assert failed.value.fatal
