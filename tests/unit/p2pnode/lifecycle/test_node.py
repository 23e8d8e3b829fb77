"""A node's states from start to exit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.harness.stub_trainer import StepTime, StubTrainer
from tests.harness.swarm import Swarm
from tests.harness.virtual_loop import run


def simulate(
    scenario: Callable[[Swarm], Awaitable[None]],
    *,
    make_trainer: Callable[[str], StubTrainer] = StubTrainer,
    **settings: Any,
) -> None:
    """Run a scenario on a simulated network with stub trainers."""

    async def main() -> None:
        keys = {key.replace("__", "."): value for key, value in settings.items()}
        swarm = Swarm(seed=5, settings=keys, make_trainer=make_trainer)
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


@pytest.mark.parametrize("method", ["bsp", "ssp", "pssp"])
def test_nodes_that_begin_together_make_their_first_step_together_though_one_compiles(method: str) -> None:
    """With `min_nodes = 2` the first step of one takes three minutes: the other does not run ahead of it, and both
    make all steps."""

    def trainer(name: str) -> StubTrainer:
        slow: StepTime = lambda _generator, step: 180.0 if step == 1 else 1.0  # noqa: E731
        return StubTrainer(name, step_s=slow if name == "n1" else 1.0)

    async def scenario(swarm: Swarm) -> None:
        quick, slow = (host.living for host in swarm.start_many(2))
        await swarm.until(lambda: quick.progress.step >= 1, within_s=60, what="the quick one trains")
        await asyncio.sleep(120.0)
        allowed = 1 if method == "bsp" else 5
        assert (slow.progress.step, quick.progress.step) == (0, allowed)
        assert quick.state == "waiting"
        await swarm.until(lambda: not swarm.running(), within_s=200, what="both end")
        assert all(len(host.trainer.trained) == 20 for host in swarm.hosts.values() if host.trainer is not None)

    settings = {"training__max_steps": 20, "training__min_nodes": 2, "barrier__method": method}
    simulate(scenario, make_trainer=trainer, **settings)
