"""`barrier.grace`, by default, in whole nodes on the simulated network: who steps together, and what it costs."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.swarms.swarm import Swarm
from tests.harness.trainers.stub_trainer import StepTime, StubTrainer
from training.barriers.grace import MOST
from training.settings import BarrierSettings

SEED = 3
NODES = 4
DELAY_S = (0.0002, 0.001)
STEPS = 40
#: Between two looks at a node, in virtual seconds: the shortest step is much longer.
LOOK_S = 0.1

#: Name of a host → its step times.
StepTimes = Callable[[str], StepTime]


def steps_of(name: str, draw: Callable[[Random], float]) -> StepTime:
    """The same steps for a host in every swarm."""
    drawn: list[float] = []
    random = Random(f"{SEED}/{name}")

    def seconds(_generator: Random, step: int) -> float:
        while len(drawn) < step:
            drawn.append(draw(random))
        return drawn[step - 1]

    return seconds


def nearly_equal(name: str) -> StepTime:
    speed = 1.0 + 0.03 * int(name[1:])
    return steps_of(name, lambda random: speed * (1.0 + 0.1 * random.random()))


def exponential(name: str) -> StepTime:
    return steps_of(name, lambda random: 0.2 + random.expovariate(1.0))


class Look:
    """What a swarm has done: for each node the steps it began abreast of others, and the seconds it has waited."""

    def __init__(self) -> None:
        self.abreast: dict[tuple[str, int], bool] = {}

    async def watch(self, swarm: Swarm, seconds: float) -> None:
        for _ in range(round(seconds / LOOK_S)):
            await asyncio.sleep(LOOK_S)
            for host in swarm.running():
                if host.living.gate.waiting is None:
                    self.abreast[host.name, host.living.progress.step] = host.living.gate.is_abreast


def waited_s(swarm: Swarm, name: str, since: int = 0) -> float:
    """The waits of a node at its barrier after this step."""
    rows = swarm.hosts[name].living.progress.steps
    return sum(row["wait_seconds"] for row in rows if row["step"] > since)


def play(
    step_times: StepTimes, scenario: Callable[[Swarm], Coroutine[Any, Any, Any]], grace: float | None = None
) -> Any:
    """The scenario in a swarm in which all nodes train."""
    print(f"seed {SEED}")

    async def main() -> Any:
        settings: dict[str, Any] = {"training.min_nodes": NODES, "exchange.shards": 1}
        if grace is not None:
            settings["barrier.grace"] = grace
        swarm = Swarm(
            seed=SEED,
            settings=settings,
            make_trainer=lambda name: StubTrainer(name, 64, step_s=step_times(name), start_s=0.2),
            delay=DELAY_S,
        )
        try:
            swarm.start_many(NODES)
            await swarm.until(lambda: len(swarm.of("training_started")) == NODES, within_s=60, what="everybody trains")
            return await scenario(swarm)
        finally:
            await swarm.stop()

    return VirtualLoop().run(main(), limit_s=3600)


def test_nodes_of_nearly_equal_speed_step_together() -> None:
    """With the defaults nine of ten steps begin abreast of others, for a tenth of the time; without grace none does,
    as far as the nodes know."""
    shares = {}
    for grace in (BarrierSettings().grace, 0.0):

        async def scenario(swarm: Swarm) -> tuple[float, float]:
            look = Look()
            await look.watch(swarm, STEPS * 1.1)
            names = [host.name for host in swarm.running()]
            trained = sum(row["train_seconds"] for name in names for row in swarm.hosts[name].living.progress.steps)
            waited = sum(waited_s(swarm, name) for name in names) / trained
            return statistics.fmean(look.abreast.values()), waited

        shares[grace] = play(nearly_equal, scenario, None if grace else 0.0)
    print(shares)

    (abreast, waited), (none, idle) = shares.values()
    assert abreast >= 0.9
    assert waited <= 0.1
    assert none == 0.0
    assert idle <= 0.01


def test_where_steps_are_of_very_unequal_length_grace_costs_little() -> None:
    """By what its credit allows at most: the nodes make nearly as many steps as without."""

    async def scenario(swarm: Swarm) -> float:
        await asyncio.sleep(100.0)
        return statistics.fmean(host.living.progress.step for host in swarm.running())

    usual, without = play(exponential, scenario), play(exponential, scenario, 0.0)
    print(usual, without)
    assert usual >= 0.97 * without


def test_a_node_that_stops_costs_the_others_their_credit_at_most() -> None:
    """It answers no more, and its shard moves to another owner, so that the others are out of step for a while. In
    twenty steps none waits longer by grace than its credit and one grace."""

    async def scenario(swarm: Swarm) -> list[float]:
        await swarm.until(
            lambda: min(host.living.progress.step for host in swarm.running()) >= 10, within_s=60, what="ten steps"
        )
        await asyncio.sleep(0.5)
        await swarm.kill("n3", refused=False)
        since = {host.name: host.living.progress.step for host in swarm.running()}
        await asyncio.sleep(20.0)
        return [waited_s(swarm, name, since[name]) for name in ("n0", "n1", "n2")]

    waits, without = play(lambda _name: 1.0, scenario), play(lambda _name: 1.0, scenario, 0.0)
    print(waits, without)
    for one, other in zip(waits, without, strict=True):
        assert one <= other + MOST + BarrierSettings().grace
