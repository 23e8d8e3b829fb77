"""The merge of the trainers of a node by `torch.distributed`, with gloo, each in a thread of its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from p2pnode.training.devices.arithmetic import weights_of
from p2pnode.training.devices.groups import DeviceGroups
from p2pnode.training.devices.positions import LeaderPositions
from p2pnode.training.trainer.device_merge import DeviceMerge
from p2pnode.training.trainer.device_turns import LeaderPulls
from p2pnode.training.trainer.vector import ModelVector
from p2pnode.training.trainer_link.interface import LeaderStep, MergeOrder, StepOrder, StepReport

ORDER = StepOrder(1, 1, 1.0, is_first=False, keeps_delta=True)
GOES_ON = StepOrder(1, 1, 1.0, is_first=False, keeps_delta=True, continues=True)


class Member:
    """A trainer with a model of three values."""

    def __init__(self, index: int, vector: np.ndarray, *, dtype: torch.dtype = torch.float32) -> None:
        self.index, self.vector = index, vector
        self.model = nn.Linear(2, 1).to(dtype)
        self.merging = DeviceMerge(ModelVector(self.model))
        self.delta = np.full(3, -1.0, np.float32)

    def train(self, order: StepOrder, by: float) -> bool:
        self.merging.load(order, self.vector, self.delta)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += by
        return self.merging.report(order, self.delta)

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


class Follower:
    """A trainer that follows leaders, in a group or in shared memory, and learns `noise` in each turn."""

    def __init__(self, index: int, vector: np.ndarray, leaders: tuple[np.ndarray, ...], *, on: str, dtype: torch.dtype):
        self.index, self.vector, self.delta = index, vector, np.zeros(3, np.float32)
        self.model = nn.Linear(2, 1).to(device=on, dtype=dtype)
        model_vector = ModelVector(self.model)
        self.merging, self.pulls = DeviceMerge(model_vector), LeaderPulls(model_vector, leaders)
        self.merging.follow(leaders)
        self.began: list[float] = []

    def train(self, order: StepOrder, noise: np.ndarray) -> None:
        self.merging.load(order, self.vector, self.delta)
        self.began += self.values
        self.pulls.begin(order, self.merging.leader)
        for row in noise:
            with torch.no_grad():
                for parameter, value in zip(self.model.parameters(), row, strict=True):
                    parameter += float(value)
            self.pulls.apply()
        self.merging.report(order, self.delta)

    def merge(self, order: MergeOrder) -> bool:
        return self.merging.merge(order, self.delta)

    @property
    def values(self) -> list[float]:
        return [float(value) for parameter in self.model.parameters() for value in parameter.detach().reshape(-1)]


def led(groups: DeviceGroups | None, *, on: Sequence[str], dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Three steps of the swarm with two cycles each, as the node makes them: where each turn began, and the node's
    deltas, the values of its leader at their ends among them."""
    rng, vector = np.random.default_rng(7), np.array([1.0, -2.0, 3.0], np.float32)
    leaders = (np.zeros(3, np.float32), np.array([2.0, 2.0, 2.0], np.float32))
    positions, kept = LeaderPositions(3, list(leaders), c1=0.25, c2=0.125), groups is not None
    positions.follow(leaders[1].copy())
    trainers = [Follower(index, vector, leaders, on=place, dtype=dtype) for index, place in enumerate(on)]
    ends: list[np.ndarray] = []
    has_merged = False
    for step in range(1, 4):
        positions.begin(None if step == 1 else np.full(3, 0.5, np.float32), vector)
        for cycle in range(2):
            stays = has_merged and cycle > 0
            order = StepOrder(
                step, 4, 1.0, is_first=False, at_delta=not stays, keeps_delta=kept,
                local_pull=0.25 if positions.leader is not None else 0.0, global_pull=0.125, continues=stays,
                keeps_place=kept, keeps_distance=has_merged and not stays,
            )  # fmt: skip
            for one in trainers:
                if order.at_delta:
                    np.copyto(one.delta, positions.start(one.index))
                one.train(order, rng.normal(size=(2, 2)))
            reports = {
                one.index: StepReport(step, 1.0, 8 * (1 + one.index), 2, 1.0, {}, float((one.index + step) % len(on)))
                for one in trainers
            }
            if groups is None:
                positions.combine(reports, {one.index: one.delta for one in trainers}, is_last=cycle == 1)
                continue
            lead = positions.step(reports, is_last=cycle == 1)
            orders = groups.orders(weights_of(reports), lead)
            with ThreadPoolExecutor(len(on)) as pool:
                done = list(pool.map(Follower.merge, trainers, [orders[one.index] for one in trainers]))
            assert done == [True] * len(on)
            positions.merged(reports, lead, trainers[0].delta)
            has_merged = True
        moved = np.zeros(3, np.float32)
        positions.delta(moved)
        ends += [moved, leaders[0].copy()]
        vector += moved
    return np.array([one.began for one in trainers]), np.array(ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_leader_steps_of_a_group_are_those_in_shared_memory(tmp_path: Path, dtype: torch.dtype) -> None:
    """With gloo all turns begin, to 1e-6, where those do whose positions the daemon keeps, pulls of both leaders
    included; so are the node's deltas, and the values of its leader that other nodes get."""
    began, ends = led(None, on=["cpu"] * 3, dtype=dtype)
    theirs, same = led(DeviceGroups("gloo", str(tmp_path / "group"), 20.0), on=["cpu"] * 3, dtype=dtype)
    assert np.ptp(began[:, 3:], axis=0).min() > 0.01, "they stand apart"
    assert np.abs(ends).max() > 0.1
    assert np.abs(theirs - began).max() < 1e-6 * np.abs(began).max()
    assert np.abs(same - ends).max() < 1e-6 * np.abs(ends).max()


def test_after_a_leader_step_without_a_member_each_writes_where_it_stands(tmp_path: Path) -> None:
    """The daemon makes the step then. A trainer that comes late writes only what it has trained."""
    leaders = (np.zeros(3, np.float32),)
    trainers = [Follower(index, np.ones(3, np.float32), leaders, on="cpu", dtype=torch.float32) for index in range(2)]
    order = StepOrder(1, 1, 1.0, is_first=False, at_delta=True, keeps_delta=True, keeps_place=True)
    for one in trainers:
        one.delta[:] = 5.0
        one.train(order, np.array([[2.0, 2.0]]))
    groups, lead = DeviceGroups("gloo", str(tmp_path / "group"), 1.0), LeaderStep(0, 0.5)
    assert not trainers[0].merging.merge(groups.orders({0: 0.5, 1: 0.5}, lead)[0], trainers[0].delta)
    assert trainers[0].merging.merge(groups.alone(0, lead), trainers[0].delta)
    assert trainers[0].delta.tolist() == [7.0] * 3
    assert trainers[1].merging.merge(groups.alone(1), trainers[1].delta)
    assert trainers[1].delta.tolist() == [2.0] * 3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants two GPUs, and torch finds fewer here")
def test_gpus_make_leader_steps_by_nccl(tmp_path: Path) -> None:
    """As with gloo, between two GPUs."""
    places = ["cuda:0", "cuda:1"]
    began, ends = led(None, on=places, dtype=torch.float32)
    theirs, same = led(DeviceGroups("nccl", str(tmp_path / "group"), 30.0), on=places, dtype=torch.float32)
    assert np.abs(theirs - began).max() < 1e-5
    assert np.abs(same - ends).max() < 1e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here")
def test_leader_steps_on_a_gpu_are_those_in_shared_memory(tmp_path: Path) -> None:
    """Two trainers share one GPU, where NCCL cannot be: gloo merges what is on it."""
    began, ends = led(None, on=["cuda:0"] * 2, dtype=torch.float32)
    theirs, same = led(DeviceGroups("gloo", str(tmp_path / "group"), 30.0), on=["cuda:0"] * 2, dtype=torch.float32)
    assert np.abs(theirs - began).max() < 1e-5
    assert np.abs(same - ends).max() < 1e-5


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants two GPUs, and torch finds fewer here")
def test_gpus_merge_by_nccl(tmp_path: Path) -> None:
    """As with gloo, between two GPUs."""
    vector = np.zeros(3, np.float32)
    members = [Member(index, vector) for index in range(2)]
    for member in members:
        member.model.to(f"cuda:{member.index}")
        member.merging = DeviceMerge(ModelVector(member.model))
        member.train(ORDER, float(member.index + 1))

    def merge(member: Member) -> bool:
        order = MergeOrder(member.index, (0, 1), 1, str(tmp_path / "group"), "nccl", 0.5, member.index == 0, 30.0)
        return member.merging.merge(order, member.delta)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(merge, members)) == [True, True]
    assert members[0].delta.tolist() == [1.5] * 3
