"""Pulls to the values of leaders after each optimiser step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from p2pnode.training.trainer.device_turns import LeaderPulls
from p2pnode.training.trainer.vector import ModelVector
from p2pnode.training.trainer_link.interface import StepOrder, Vector

NODE, SWARM = np.full(3, 8.0, np.float32), np.full(3, 16.0, np.float32)


def order(local: float, glob: float) -> StepOrder:
    return StepOrder(1, 1, 1.0, is_first=False, local_pull=local, global_pull=glob)


def pulled(
    of: StepOrder, *vectors: Vector, leader: torch.Tensor | None = None, dtype: torch.dtype = torch.float32
) -> list[float]:
    """A model whose values are 0, after one optimiser step."""
    model = nn.Linear(2, 1).to(dtype)
    pulls = LeaderPulls(ModelVector(model), vectors)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    pulls.begin(of, leader)
    pulls.apply()
    return [float(value) for parameter in model.parameters() for value in parameter.detach().reshape(-1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_pull_to_the_leader_of_the_swarm_is_first(dtype: torch.dtype) -> None:
    """A half of the way to 16, and from 8 a quarter to 8; alone each goes its share."""
    assert pulled(order(0.25, 0.5), NODE, SWARM, dtype=dtype) == [8.0] * 3
    assert pulled(order(0.5, 0.5), np.zeros(3, np.float32), SWARM, dtype=dtype) == [4.0] * 3
    assert pulled(order(0.25, 0.0), NODE, SWARM, dtype=dtype) == [2.0] * 3
    assert pulled(order(0.0, 0.25), NODE, SWARM, dtype=dtype) == [4.0] * 3


def test_without_a_share_or_without_leaders_nothing_is_pulled() -> None:
    """A trainer that follows nobody has none; with a share of 1 it is where the leader is."""
    assert pulled(order(0.0, 0.0), NODE, SWARM) == [0.0] * 3
    assert pulled(order(0.5, 0.5)) == [0.0] * 3
    assert pulled(order(0.5, 0.5), NODE) == [4.0] * 3
    assert pulled(order(1.0, 0.0), NODE, SWARM) == [8.0] * 3


def test_values_of_the_leader_on_the_device_replace_those_in_memory() -> None:
    """Those of the swarm's leader stay."""
    leader = torch.full((3,), 32.0)

    assert pulled(order(0.25, 0.0), NODE, SWARM, leader=leader) == [8.0] * 3
    assert pulled(order(0.0, 0.25), NODE, SWARM, leader=leader) == [4.0] * 3


def test_what_a_leader_does_during_a_turn_counts_in_the_next_where_it_is_elsewhere() -> None:
    """The pulls of a turn are forgotten with it."""
    model = nn.Linear(2, 1)
    pulls = LeaderPulls(ModelVector(model), (NODE,))
    pulls.begin(order(1.0, 0.0))
    pulls.begin(order(0.0, 0.0))
    before = model.weight.detach().clone()
    pulls.apply()

    assert torch.equal(model.weight, before)
