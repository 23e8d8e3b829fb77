"""The merge of the trainers of a node by `torch.distributed`, with gloo, each in a thread of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from p2pnode.training.trainer.device_turns import DeviceTurns
from p2pnode.training.trainer.model.vector import ModelVector
from p2pnode.training.trainer_link.interface import MergeOrder, StepOrder

ORDER = StepOrder(1, 1, 1.0, is_first=False, keeps_delta=True)
GOES_ON = StepOrder(1, 1, 1.0, is_first=False, keeps_delta=True, continues=True)


class Member:
    """A trainer with a model of three values."""

    def __init__(self, index: int, vector: np.ndarray, *, dtype: torch.dtype = torch.float32) -> None:
        self.index, self.vector = index, vector
        self.model = nn.Linear(2, 1).to(dtype)
        self.merging = DeviceTurns(ModelVector(self.model), None)
        self.delta = np.full(3, -1.0, np.float32)

    def train(self, order: StepOrder, by: float) -> bool:
        self.merging.order = order
        self.merging.load(self.vector, self.delta)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += by
        return self.merging.report(self.delta)

    def merge(self, place: Path, members: tuple[int, ...], weight: float) -> bool:
        order = MergeOrder(self.index, members, 1, str(place), "gloo", weight, self.index == members[0], 2.0)
        return self.merging.merge(order, self.delta)

    @property
    def values(self) -> list[float]:
        return [float(value) for parameter in self.model.parameters() for value in parameter.detach().reshape(-1)]


def merged(members: list[Member], place: Path, weights: list[float]) -> list[bool]:
    who = tuple(member.index for member in members)
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(lambda one: one[0].merge(place, who, one[1]), zip(members, weights, strict=True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_members_go_on_from_their_weighted_mean(tmp_path: Path, dtype: torch.dtype) -> None:
    """One writes the mean, the others nothing; all go on from it, though the vector has changed meanwhile, and the next
    merge has what was trained since."""
    vector = np.array([1.0, 2.0, 3.0], np.float32)
    members = [Member(index, vector, dtype=dtype) for index in (0, 2)]
    assert [member.train(ORDER, by) for member, by in zip(members, (1.0, 4.0), strict=True)] == [True, True]
    assert merged(members, tmp_path / "group", [0.75, 0.25]) == [True, True]
    assert members[0].delta.tolist() == [1.75] * 3
    assert members[1].delta.tolist() == [-1.0] * 3
    vector += 100.0
    for member in members:
        member.train(GOES_ON, 0.5)
        assert sorted(member.values) == [3.25, 4.25, 5.25]
    assert merged(members, tmp_path / "group", [0.5, 0.5]) == [True, True]
    assert members[0].delta.tolist() == [0.5] * 3
    members[1].train(ORDER, 0.0)
    assert sorted(members[1].values) == [101.0, 102.0, 103.0]


def test_without_a_member_each_still_has_its_own_delta(tmp_path: Path) -> None:
    """Where one of the group does not come the merge fails in time, and alone each writes what it has trained."""
    vector = np.zeros(3, np.float32)
    members = [Member(index, vector) for index in range(3)]
    for member in members:
        member.train(ORDER, float(member.index + 1))
    who = (0, 1, 2)
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda member: member.merge(tmp_path / "group", who, 1 / 3), members[:2]))
    assert done == [False, False]
    for member in members:
        assert member.merge(tmp_path / "unused", (member.index,), 1.0)
        assert member.delta.tolist() == [float(member.index + 1)] * 3


def test_a_delta_that_is_not_finite_is_said_to_be() -> None:
    """The daemon leaves such a trainer out of the group; without a merge it looks itself."""
    member = Member(0, np.zeros(3, np.float32))
    assert member.train(ORDER, 1.0)
    assert not member.train(ORDER, float("nan"))
    assert member.train(StepOrder(1, 1, 1.0, is_first=False), 2.0)
    assert member.delta.tolist() == [2.0] * 3


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants two GPUs, and torch finds fewer here")
def test_gpus_merge_by_nccl(tmp_path: Path) -> None:
    """As with gloo, between two GPUs."""
    vector = np.zeros(3, np.float32)
    members = [Member(index, vector) for index in range(2)]
    for member in members:
        member.model.to(f"cuda:{member.index}")
        member.merging = DeviceTurns(ModelVector(member.model), None)
        member.train(ORDER, float(member.index + 1))

    def merge(member: Member) -> bool:
        order = MergeOrder(member.index, (0, 1), 1, str(tmp_path / "group"), "nccl", 0.5, member.index == 0, 30.0)
        return member.merging.merge(order, member.delta)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(merge, members)) == [True, True]
    assert members[0].delta.tolist() == [1.5] * 3
