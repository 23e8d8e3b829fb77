"""The end of a node: lingering, handing over, leaving."""

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


def test_a_finished_node_lingers_while_others_train_and_no_longer_than_allowed() -> None:
    """Alone it ends at once; beside a training node it ends after `linger_s`."""

    async def scenario(swarm: Swarm) -> None:
        alone = swarm.start("n0", training__max_steps=2)
        await swarm.until(lambda: alone.task is not None and alone.task.done(), within_s=15, what="it ends alone")
        assert not [record for record in swarm.records if record.event == "linger_over"]

        other = swarm.start("n1")
        await swarm.until(lambda: other.living.progress.step >= 1, within_s=30, what="another trains")
        brief = swarm.start("n2", bootstrap="n1", training__max_seconds=2.0)
        await swarm.until(lambda: brief.task is not None and brief.task.done(), within_s=60, what="it ends")
        over = [record for record in swarm.records if record.event == "linger_over"]
        assert [record.fields["seconds"] for record in over] == [3.0]

    simulate(scenario, training__linger_s=3.0)


def test_a_leaving_node_hands_its_shards_over() -> None:
    """After one of two nodes has left, the other owns every shard and nothing was left behind."""

    async def scenario(swarm: Swarm) -> None:
        first, second = swarm.start_many(2)
        await swarm.until(
            lambda: all(host.living.progress.step >= 5 for host in (first, second)), within_s=90, what="both train"
        )
        second.living.leave()
        assert second.task is not None
        assert await second.task == "leave"

        exchange = first.living.exchange
        assert exchange is not None
        assert len(exchange.store.owned) == len(exchange.store)
        assert not [record for record in swarm.records if record.event == "left_behind"]

    simulate(scenario)
