"""The benchmarks' own arithmetic: sizing the load, ratios, turns, and the trainers that take no time."""

from __future__ import annotations

import random

import pytest

from benchmarks.bare_loop import MOST_ROUNDS, calibrated, stepper, train_for
from benchmarks.contestants import alternate
from benchmarks.gate import Turn
from benchmarks.gated_daemon import GatedTrainer
from benchmarks.steps import between, median_interval
from p2pnode.training.settings import TrainingSettings
from p2pnode.training.trainer_link.interface import Trainer
from tests.process.harness.sleeping_daemon import SleepingTrainer


@pytest.mark.parametrize(("target_s", "rounds"), [(0.005, 4), (0.0001, 1), (0.02, 19), (1e9, MOST_ROUNDS)])
def test_the_load_is_sized_by_timing_it(target_s: float, rounds: int) -> None:
    """On a machine with a millisecond of overhead and one per round, the nearest number of rounds is found."""
    found = calibrated(target_s, lambda count: 0.001 * (1 + count))

    assert found == pytest.approx(rounds, abs=1)


def test_a_machine_that_slows_down_does_not_show_in_the_ratio() -> None:
    """Each turn of the node is held against the mean of the loop's before and after it."""
    assert between([95.0, 76.0], [110.0, 90.0, 70.0]) == pytest.approx([0.95, 0.95])


@pytest.mark.parametrize(("count", "low", "high"), [(1, 1, 1), (5, 1, 5), (6, 1, 6), (15, 4, 12), (20, 6, 15)])
def test_the_interval_of_a_median_is_the_binomial_one(count: int, low: int, high: int) -> None:
    """The ranks that tables of the sign test give for 95 %, and all of it where the values are too few."""
    values = list(range(1, count + 1))
    random.Random(5).shuffle(values)

    assert median_interval(values) == (low, high)


def test_the_bare_loop_trains_the_load() -> None:
    """A stepper steps: the time given is used, and steps are counted."""
    steps, seconds = train_for(stepper({"width": 8, "layers": 1, "batch_size": 2, "rounds": 2}), 0.05)

    assert steps > 0
    assert seconds >= 0.05


def test_no_turn_begins_before_all_contestants_wait() -> None:
    """Every turn comes after a check of all contestants; the order is reversed every time; the first turns do not
    count."""
    history: list[str] = []

    class Fake:
        peers = 1

        def __init__(self, name: str) -> None:
            self.name = name

        def ready(self) -> None:
            history.append(f"{self.name} ready")

        def turn(self) -> Turn:
            history.append(self.name)
            return Turn(float(len(history)), 0.0)

    taken = alternate([Fake("a"), Fake("b")], 2, warm=1)

    turns = [place for place, word in enumerate(history) if word in ("a", "b")]
    assert [history[place] for place in turns] == ["a", "b", "a", "b", "b", "a"]
    assert all(history[place - 2 : place] == ["a ready", "b ready"] for place in turns)
    assert [[turn.seconds for turn in one] for one in taken] == [[9.0, 18.0], [12.0, 15.0]]


@pytest.mark.parametrize("kind", [GatedTrainer, SleepingTrainer])
def test_the_trainers_of_benchmarks_have_all_that_a_daemon_uses(kind: type) -> None:
    """A daemon that asks for something else fails in the middle of a measurement."""
    options = {"gate": "", "parameters": 8, "seed": 0, "mean_s": 1.0, "number": 0}
    trainer = kind(TrainingSettings(options=options))
    wanted = [name for name in (*vars(Trainer), *Trainer.__annotations__) if not name.startswith("_")]

    assert [name for name in wanted if not hasattr(trainer, name)] == []
