"""How a node gets into training: founding, joining, and starting again."""

from __future__ import annotations

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


def test_only_a_node_without_bootstraps_founds() -> None:
    """The first node founds; the one with a bootstrap joins the same swarm and gets its step."""

    async def scenario(swarm: Swarm) -> None:
        first = swarm.start("n0").living
        await swarm.until(lambda: first.progress.step >= 5, within_s=60, what="the first trains")
        second = swarm.start("n1", bootstrap="n0").living
        await swarm.until(lambda: second.state == "training", within_s=60, what="the second trains")

        assert (first.founder, second.founder) == (True, False)
        assert second.overlay.genesis == first.overlay.genesis
        assert second.progress.step >= 5

    simulate(scenario)


def test_a_founder_that_starts_again_resumes_its_swarm_from_disk() -> None:
    """Genesis, identity and step are those of the last checkpoint; the incarnation is the next."""

    async def scenario(swarm: Swarm) -> None:
        host = swarm.start("n0")
        before = host.living
        await swarm.until(lambda: before.progress.step >= 5, within_s=60, what="it trains")
        before.leave()
        assert host.task is not None
        await host.task
        step = before.progress.step

        after = swarm.start("n0").living
        await swarm.until(lambda: after.state == "training", within_s=60, what="it trains again")

        assert after.founder
        assert after.identity.node_id == before.identity.node_id
        assert after.overlay.genesis == before.overlay.genesis
        assert after.incarnation == before.incarnation + 1
        assert after.progress.step >= step

    simulate(scenario, training__checkpoint_s=1.0)
