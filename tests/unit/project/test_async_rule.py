"""The simulation of barriers and rules: it adds what was trained, and values enter when its ways say."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.async_rule import LOCAL_STEPS, Swarm, way_of
from benchmarks.record import NotMeasured
from benchmarks.virtual_worker import LATE
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.tasks.task import TrainSpec
from p2pnode.training.trainer.runner import TaskRunner

SIZE, NODES, STEPS, RATE = 16, 3, 5, 0.05


class Pull:
    """Draws its weights to a number of its own, by known steps. Notes where each optimiser step begins."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.begins: list[Tensor] = []

    def build(self) -> TrainSpec:
        model = nn.Linear(SIZE, 1, bias=False)
        nn.init.zeros_(model.weight)
        return TrainSpec(model, torch.optim.SGD(model.parameters(), lr=RATE))

    def batches(self) -> Iterator[Tensor]:
        while True:
            yield torch.zeros(1)

    def loss(self, model: nn.Module, _batch: Tensor) -> Tensor:
        (weight,) = model.parameters()
        self.begins.append(weight.detach().clone().reshape(-1))
        return (weight - self.number).square().sum() / 2

    def evaluate(self, _model: nn.Module) -> tuple[dict[str, float], int]:
        raise NotImplementedError

    def steps(self) -> list[Tensor]:
        """What each optimiser step has trained."""
        return [RATE * (self.number - weight) for weight in self.begins]

    def moved(self) -> set[int]:
        """Before which optimiser steps of a turn values have entered."""
        ends = [weight + step for weight, step in zip(self.begins, self.steps(), strict=True)]
        pairs = enumerate(zip(ends, self.begins[1:], strict=False), 1)
        return {place % LOCAL_STEPS for place, (end, begin) in pairs if not torch.allclose(end, begin, atol=1e-5)}


def run(way: str, seed: int = 3) -> tuple[Swarm, list[Pull]]:
    tasks = [Pull(number) for number in (1, 2, 6)]
    swarm = Swarm([TaskRunner("pull", task, task.build()) for task in tasks], way_of(way), seed, "float32")
    assert list(swarm.run(STEPS)) == list(range(1, NODES * STEPS + 1))
    return swarm, tasks


@pytest.mark.parametrize("way", ["bsp 1/0", "asp 1/0", "pssp 1/0 late=0", "asp 1/0 late=1", "pssp 1/0 shape=1"])
def test_every_delta_is_added_once_with_its_weight(way: str) -> None:
    """With rate 1 and no momentum the value is the sum of all that was trained, by one over the number of nodes."""
    swarm, tasks = run(way)

    expected = sum(torch.stack(task.steps()).sum(0).numpy() for task in tasks) / NODES
    np.testing.assert_allclose(swarm.state.value, expected, rtol=1e-4)
    assert swarm.state.version == NODES * STEPS


def test_under_bsp_all_begin_a_step_with_the_same_values() -> None:
    """And without a barrier they do not."""
    for way, equal in (("bsp 1/0", True), ("asp 1/0 late=0", False)):
        _, tasks = run(way)
        steps = zip(*(task.begins[::LOCAL_STEPS] for task in tasks), strict=True)
        same = [torch.equal(begins[0], other) for begins in steps for other in begins]
        assert all(same) is equal, way


@pytest.mark.parametrize(("way", "moved"), [("asp", 3), ("asp late=0", 0), ("asp late=0.5", 5), ("bsp", 0)])
def test_values_enter_between_two_optimiser_steps(way: str, moved: int) -> None:
    """When so much of the turn after the cut has passed, and at no other one."""
    assert [task.moved() for task in run(way)[1]] == [{moved}] * NODES


def test_a_way_is_a_barrier_a_rule_and_options() -> None:
    """What is not given is the default."""
    usual = ExchangeSettings()

    assert way_of("pssp")[1:] == (Rule(usual.outer_lr, usual.outer_momentum), LATE, 1.0, 0.0)
    assert way_of("pssp slow=1.5 shape=4")[3:] == (1.5, 4.0)
    assert way_of("asp 1/0 late=0.5")[1:] == (Rule(1.0, 0.0), 0.5, 1.0, 0.0)
    assert way_of("bsp shape=1").late == 0.0


@pytest.mark.parametrize(
    "text", ["", "psp", "asp 1", "asp 1/x", "asp 1/0 later=1", "asp late=", "bsp late=0.3", "asp late=1.5"]
)
def test_a_way_that_makes_no_sense_is_refused(text: str) -> None:
    """The message has the text."""
    with pytest.raises(NotMeasured, match=f'--ways "{text}'):
        way_of(text)
