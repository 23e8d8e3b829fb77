"""`exchange.overlap` in whole nodes on the simulated network: every delta counts once, in the model and in what the
next step begins with, and nobody writes into memory that another reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.runner.long_run import more
from tests.harness.swarms.swarm import Swarm
from tests.harness.trainers.stub_trainer import StubTrainer, initial_vector
from training.trainer_link.interface import StepOrder

SIZE, NODES = 64, 4
#: Every delta is added once with weight 1.
EXACT: dict[str, Any] = {
    "exchange.overlap": True,
    "exchange.weight": "sum",
    "exchange.outer_lr": 1.0,
    "exchange.outer_momentum": 0.0,
    "exchange.pull_codec": "float32",
    "exchange.shards": 8,
    "training.min_nodes": NODES,
    "training.linger_s": 120.0,
}


class Counter(StubTrainer):
    """Adds 1 to its own part of the vector in each step, so that every vector says which deltas are in it.

    It loads and writes in halves, with time between them. `wrong` lists what a turn began with but for the deltas that
    this node had made, once each; `torn` counts loads during which the vector or the delta changed.
    """

    def __init__(self, name: str, step_s: float) -> None:
        super().__init__(name, SIZE, step_s=step_s, start_s=0.3)
        self.part = slice(int(name[1:]), SIZE, NODES)
        self.initial = initial_vector(0, SIZE)
        self.wrong: list[tuple[int, int, list[float]]] = []
        self.torn = 0
        self.carried = 0
        self.begins: list[np.ndarray] = []

    async def load(self, order: StepOrder) -> None:
        begin = self.vector + np.float32(order.carry) * self.delta
        vector, delta = self.vector.copy(), self.delta.copy()
        await asyncio.sleep(0.05)
        self.torn += not (np.array_equal(vector, self.vector) and np.array_equal(delta, self.delta))
        self.carried += order.carry > 0
        counted = (begin - self.initial)[self.part]
        if not np.all(counted == len(self.trained)):
            self.wrong.append((order.step, len(self.trained), counted.tolist()))
        self.begins.append(begin - self.initial)

    async def write_delta(self, order: StepOrder) -> None:
        self.delta.fill(1e6)
        await asyncio.sleep(0.01)
        self.delta.fill(0.0)
        self.delta[self.part] = 1.0


def simulate(
    scenario: Callable[[Swarm], Awaitable[None]], *, seed: int = 11, step_s: float = 1.0, **settings: Any
) -> Swarm:
    """Run a scenario; the last of the nodes is three times as slow as the others."""
    print(f"seed {seed}")
    worlds = []

    def make(name: str) -> Counter:
        return Counter(name, step_s * (3 if name == f"n{NODES - 1}" else 1))

    async def main() -> None:
        chosen = {**EXACT, **{key.replace("__", "."): value for key, value in settings.items()}}
        swarm = Swarm(seed=seed, settings=chosen, make_trainer=make)
        worlds.append(swarm)
        try:
            await scenario(swarm)
        finally:
            await swarm.stop()

    VirtualLoop().run(main(), limit_s=3600)
    return worlds[0]


def counters(swarm: Swarm) -> list[Counter]:
    return [host.trainer for host in swarm.hosts.values() if isinstance(host.trainer, Counter)]


async def ended(swarm: Swarm) -> None:
    tasks = [host.task for host in swarm.hosts.values() if host.task is not None]
    await swarm.until(lambda: all(task.done() for task in tasks), within_s=900, what="the end of the run")
    for task in tasks:
        task.result()


@pytest.mark.parametrize(
    ("method", "codec"), [("pssp", "bfloat16"), *more(("asp", "float32"), ("asp", "bfloat16"), ("pssp", "float32"))]
)
def test_every_delta_counts_once_in_the_model_and_in_what_the_next_step_begins_with(method: str, codec: str) -> None:
    """Four nodes of two speeds: no carried delta is pushed again, none is carried twice or dropped, and all nodes end
    with the same values."""

    async def scenario(swarm: Swarm) -> None:
        swarm.start_many(NODES)
        await ended(swarm)

    swarm = simulate(scenario, barrier__method=method, exchange__codec=codec, training__max_steps=12)

    for trainer in counters(swarm):
        assert (trainer.wrong, trainer.torn) == ([], 0)
        assert trainer.trained == list(range(1, 13))
        assert trainer.carried == 11
        assert np.array_equal(trainer.vector - trainer.initial, np.full(SIZE, 12.0))
    assert not swarm.of("delta_refused")


def test_nodes_that_begin_and_cease_to_overlap_count_every_delta_once() -> None:
    """With "auto" slow lines turn overlap on, faster ones off again; the sums stay exact throughout."""

    async def scenario(swarm: Swarm) -> None:
        swarm.start_many(NODES)
        hosts = [f"10.0.0.{number + 2}" for number in range(NODES)]
        trained = [host.living.progress for host in swarm.hosts.values()]
        await swarm.until(lambda: min(progress.step for progress in trained) >= 3, within_s=60, what="some steps")
        for host in hosts:
            swarm.network.line(host, 8000.0)
        await swarm.until(lambda: len(swarm.of("overlap_on")) == NODES, within_s=400, what="overlap on all nodes")
        for host in hosts:
            swarm.network.line(host, 1e9)
        await ended(swarm)

    swarm = simulate(scenario, exchange__overlap="auto", training__max_steps=45, barrier__method="asp", seed=13)

    assert len(swarm.of("overlap_off")) == NODES
    for trainer in counters(swarm):
        assert (trainer.wrong, trainer.torn) == ([], 0)
        assert trainer.trained == list(range(1, 46))
        assert 0 < trainer.carried < 44
        assert np.array_equal(trainer.vector - trainer.initial, np.full(SIZE, 45.0))


def test_a_node_is_one_step_further_ahead_than_its_barrier_says() -> None:
    """ssp with staleness 1: whoever begins step t + 2 has seen all nodes at t - 1; and overlap does use that step."""

    lag: list[int] = []

    async def scenario(swarm: Swarm) -> None:
        swarm.start_many(NODES)
        for trainer in counters(swarm):
            load = trainer.load

            async def noted(order: StepOrder, load: Any = load) -> None:
                lag.append(order.step - 1 - min(host.living.progress.step for host in swarm.hosts.values()))
                await load(order)

            trainer.load = noted  # type: ignore[method-assign]
        await ended(swarm)

    simulate(scenario, barrier__method="ssp", barrier__staleness=1, training__max_steps=12)
    assert max(lag) == 2


def test_under_bsp_the_history_is_that_without_overlap() -> None:
    """Every event at the same moment with the same fields, and every bit of the model; only the log says so."""

    async def scenario(swarm: Swarm) -> None:
        swarm.start_many(NODES)
        await ended(swarm)

    asked, plain = (
        simulate(scenario, barrier__method="bsp", exchange__overlap=overlap, training__max_steps=6)
        for overlap in (True, False)
    )

    assert [record for record in asked.records if record.event != "overlap_off"] == plain.records
    assert len(asked.of("overlap_off")) == NODES
    for one, other in zip(counters(asked), counters(plain), strict=True):
        assert one.carried == 0
        assert one.vector.tobytes() == other.vector.tobytes()


def test_one_node_alone_begins_each_step_with_its_own_last_one() -> None:
    """Without others overlap changes nothing: each begin is the sum of all deltas before it."""

    async def scenario(swarm: Swarm) -> None:
        swarm.start("n0", training__min_nodes=1)
        await ended(swarm)

    [trainer] = counters(simulate(scenario, training__max_steps=10))
    assert [float(begin[0]) for begin in trainer.begins] == list(range(10))
    assert trainer.torn == 0


def test_a_trainer_that_crashes_and_a_node_that_pauses_lose_and_double_nothing() -> None:
    """Both begin again with pulled values; the numbers of steps stay unique, and the sum is exact."""

    async def scenario(swarm: Swarm) -> None:
        swarm.start_many(NODES)
        await swarm.until(lambda: swarm.hosts["n0"].living.progress.step >= 3, within_s=60, what="some steps")
        counters(swarm)[0].crash_next(2)
        swarm.hosts["n1"].living.pause()
        await asyncio.sleep(8.0)
        swarm.hosts["n1"].living.resume()
        counters(swarm)[2].crash_next(1)
        await ended(swarm)

    swarm = simulate(scenario, training__max_steps=18, barrier__method="asp", seed=12)

    made = [len(trainer.trained) for trainer in counters(swarm)]
    for trainer in counters(swarm):
        assert (trainer.wrong, trainer.torn) == ([], 0)
        assert len(set(trainer.trained)) == len(trainer.trained)
        ends = [float((trainer.vector - trainer.initial)[number]) for number in range(NODES)]
        assert ends == [float(count) for count in made]


@pytest.mark.parametrize("how", ["leave", "kill"])
def test_a_node_that_leaves_delivers_what_it_has_trained(how: str) -> None:
    """A leaver waits for no barrier to push its last delta. A killed node loses what it had not pushed, and nothing
    that it had announced."""

    async def scenario(swarm: Swarm) -> None:
        swarm.start_many(NODES)
        fast, slow = swarm.hosts["n0"], swarm.hosts[f"n{NODES - 1}"]
        await swarm.until(lambda: slow.living.progress.step >= 3, within_s=60, what="some steps")
        node = fast.living
        waits = lambda: node.gate.waiting is not None  # noqa: E731
        await swarm.until(
            lambda: waits() and node.progress.is_training, within_s=60, what="a step trained before a barrier"
        )
        assert node.state == "training"
        await swarm.until(
            lambda: waits() and not node.progress.is_training, within_s=60, what="a trainer behind a barrier"
        )
        assert node.state == "waiting"
        trainer = fast.trainer
        assert trainer is not None
        assert len(trainer.trained) == fast.living.progress.step + 1
        announced = fast.living.progress.step
        if how == "kill":
            await swarm.kill("n0")
        else:
            fast.living.leave()
            await swarm.until(lambda: fast.task is not None and fast.task.done(), within_s=60, what="the leave")
        await asyncio.sleep(15.0)
        for name in ("n1", "n2", "n3"):
            swarm.hosts[name].living.pause()
        await asyncio.sleep(15.0)
        count = float((swarm.value() - counters(swarm)[0].initial)[0])
        assert count == announced + (how == "leave")
        for number in (1, 2, 3):
            found = float((swarm.value() - counters(swarm)[0].initial)[number])
            assert found == len(counters(swarm)[number].trained)

    simulate(scenario, barrier__method="ssp", barrier__staleness=1, seed=13)
