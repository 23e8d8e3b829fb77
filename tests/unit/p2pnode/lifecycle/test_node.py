"""A node's states from start to exit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tests.harness.stub_trainer import StubTrainer
from tests.harness.swarm import Swarm
from tests.harness.virtual_loop import run


def simulate(scenario: Callable[[Swarm], Awaitable[None]], **settings: Any) -> None:
    """Run a scenario on a simulated network with stub trainers."""

    async def main() -> None:
        keys = {key.replace("__", "."): value for key, value in settings.items()}
        swarm = Swarm(seed=5, settings=keys, make_trainer=lambda name: StubTrainer(name))
        try:
            await scenario(swarm)
        finally:
            await swarm.stop()

    run(main(), limit_s=600)


def test_the_states_of_a_run() -> None:
    """A node joins, trains, pauses on request, trains again, and ends with "leave"."""

    async def scenario(swarm: Swarm) -> None:
        host = swarm.start("n0")
        node = host.living
        assert (node.state, node.budget()) == ("joining", None)
        await swarm.until(lambda: node.progress.step >= 2, within_s=30, what="it trains")
        assert node.budget() is not None
        assert node.nodes_ready() == 1

        node.pause()
        assert node.state == "paused"
        await asyncio.sleep(3.0)
        step = node.progress.step
        await asyncio.sleep(3.0)
        assert node.progress.step == step
        node.resume()
        await swarm.until(lambda: node.progress.step > step, within_s=30, what="it trains again")

        node.leave()
        assert host.task is not None
        assert await host.task == "leave"

    simulate(scenario)


def test_a_pause_before_training_holds() -> None:
    """A node that is paused while it starts makes no step until it is resumed."""

    async def scenario(swarm: Swarm) -> None:
        node = swarm.start("n0").living
        node.pause()
        await asyncio.sleep(10.0)
        assert (node.state, node.progress.step) == ("paused", 0)

        node.resume()
        await swarm.until(lambda: node.progress.step >= 1, within_s=30, what="a step")

    simulate(scenario)
