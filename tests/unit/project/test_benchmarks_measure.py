"""The benchmarks' own arithmetic: virtual time, the simulated swarm, sizing the load, the loop probe."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from random import Random

import pytest
import torch

from benchmarks import outer_rule
from benchmarks.bare_loop import MOST_ROUNDS, calibrated, stepper, train_for
from benchmarks.contestants import alternate
from benchmarks.gate import Turn
from benchmarks.outer_rule import Study, completions, default_rule, differences
from benchmarks.probed import probe, window
from benchmarks.steps import between, median_interval
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards.outer_rule import Rule


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Iterator[Study]:
    """A short one, on the bundled digits and on one thread: two of them wait for each other on a busy machine."""
    monkeypatch.setitem(outer_rule.TASKS, "mlp", "digits")
    monkeypatch.setattr(outer_rule, "CHECKPOINTS", (1, 3))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Study("mlp", None, "cpu")
    torch.set_num_threads(threads)


def test_completions_are_a_function_of_the_seed() -> None:
    """The same seed gives the same order of steps, and another seed another one."""
    first, again, other = (list(islice(completions(4, Random(seed)), 200)) for seed in (7, 7, 8))

    assert first == again
    assert first != other


def test_every_node_makes_progress_at_its_own_speed() -> None:
    """No node is left out, and the order is no round robin."""
    order = list(islice(completions(4, Random(3)), 400))

    assert min(Counter(order).values()) > 40
    assert order[:40] != [0, 1, 2, 3] * 10


def test_differences_take_the_worst_checkpoint_of_each_seed() -> None:
    """A swarm that is ahead at the end is still rated by where it was behind."""
    assert differences([{10: 80.0, 20: 95.0}, {10: 84.0, 20: 90.0}], [{10: 82.0, 20: 90.0}] * 2) == [-2.0, 0.0]


def test_the_rule_measured_is_the_default() -> None:
    """What the figure claims of the default outer rule is measured with the default settings."""
    settings = ExchangeSettings()

    assert default_rule() == Rule(settings.outer_lr, settings.outer_momentum)


def test_one_node_with_the_plain_sum_is_the_bare_loop(study: Study) -> None:
    """With outer_lr 1, no momentum and exact deltas the simulated swarm of one is the torch loop."""
    study._settings = ExchangeSettings(codec="float32")

    assert study.swarm(1, 5, Rule(1.0, 0.0)) == pytest.approx(study.bare(5), abs=0.3)


def test_a_simulated_swarm_repeats_itself(study: Study) -> None:
    """The same seed gives the same accuracies, digit by digit."""
    assert study.swarm(3, 1, default_rule()) == study.swarm(3, 1, default_rule())


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


class Noticed(list[tuple[float, float]]):
    """Wake-ups that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.fresh = asyncio.Event()

    def append(self, wake: tuple[float, float]) -> None:
        super().append(wake)
        self.fresh.set()

    async def another(self) -> float:
        """The moment of the next wake-up."""
        self.fresh.clear()
        async with asyncio.timeout(10):
            await self.fresh.wait()
        return self[-1][0]


def test_the_probe_sees_a_held_loop() -> None:
    """A callback that holds the loop shows as a wake-up that much late, and only in its window."""
    wakes = Noticed()

    async def hold() -> tuple[float, float]:
        watch = asyncio.create_task(probe(wakes))
        held_s = await wakes.another()
        end_s = held_s + 0.05
        while time.monotonic() < end_s:
            pass
        woke_s = await wakes.another()
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        return held_s, woke_s

    held_s, woke_s = asyncio.run(hold())

    assert max(window(wakes, held_s, woke_s)) > 30
    assert window(wakes, 0.0, held_s / 2) == []


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
