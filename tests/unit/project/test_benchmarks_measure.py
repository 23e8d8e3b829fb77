"""The benchmarks' own arithmetic: sizing the load, ratios, turns, and the trainers that take no time."""

from __future__ import annotations

import random

import pytest

from benchmarks.gated_daemon import GatedTrainer
from benchmarks.steps import median_interval
from p2pnode.training.settings import TrainingSettings
from p2pnode.training.trainer_link.interface import Trainer
from tests.process.harness.sleeping_daemon import SleepingTrainer


@pytest.mark.parametrize(("count", "low", "high"), [(1, 1, 1), (5, 1, 5), (6, 1, 6), (15, 4, 12), (20, 6, 15)])
def test_the_interval_of_a_median_is_the_binomial_one(count: int, low: int, high: int) -> None:
    """The ranks that tables of the sign test give for 95 %, and all of it where the values are too few."""
    values = list(range(1, count + 1))
    random.Random(5).shuffle(values)

    assert median_interval(values) == (low, high)


@pytest.mark.parametrize("kind", [GatedTrainer, SleepingTrainer])
def test_the_trainers_of_benchmarks_have_all_that_a_daemon_uses(kind: type) -> None:
    """A daemon that asks for something else fails in the middle of a measurement."""
    options = {"gate": "", "parameters": 8, "seed": 0, "mean_s": 1.0, "number": 0}
    trainer = kind(TrainingSettings(options=options))
    wanted = [name for name in (*vars(Trainer), *Trainer.__annotations__) if not name.startswith("_")]

    assert [name for name in wanted if not hasattr(trainer, name)] == []
