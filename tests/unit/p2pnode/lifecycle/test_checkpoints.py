"""When checkpoints are written, and a disk that refuses them."""

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


def checkpoints(swarm: Swarm) -> list[str]:
    """The folders of checkpoints on the first host's disk."""
    return sorted({name.split("/")[1] for name in swarm.hosts["n0"].disk.names("checkpoints")})


def test_checkpoints_are_written_regularly_and_on_leaving() -> None:
    """One per period while steps are made, the last at the step of leaving, and not more than are to be kept."""

    async def scenario(swarm: Swarm) -> None:
        host = swarm.start("n0", training__checkpoint_s=2.0, training__keep_checkpoints=2)
        node = host.living
        await swarm.until(lambda: node.progress.step >= 10, within_s=60, what="it trains")
        written = [record.fields["step"] for record in swarm.records if record.event == "checkpoint_written"]
        assert len(written) >= 2

        node.leave()
        assert host.task is not None
        await host.task
        steps = [record.fields["step"] for record in swarm.records if record.event == "checkpoint_written"]
        assert steps[-1] == node.progress.step
        assert steps == sorted(steps)

    simulate(scenario)


def test_a_full_disk_is_logged_and_training_continues() -> None:
    """Each failed checkpoint is an event; no step is lost."""

    async def scenario(swarm: Swarm) -> None:
        host = swarm.start("n0", training__checkpoint_s=1.0)
        node = host.living
        await swarm.until(lambda: node.progress.step >= 1, within_s=60, what="a step")

        def refuse(_name: str, _data: bytes, *, private: bool = False) -> None:
            raise OSError(28, "No space left on device")

        host.disk.write = refuse  # type: ignore[method-assign]
        step = node.progress.step
        await swarm.until(lambda: node.progress.step >= step + 5, within_s=60, what="five more steps")

        refused = [record for record in swarm.records if record.event == "checkpoint_not_written"]
        assert refused
        assert "No space left" in refused[0].fields["reason"]

    simulate(scenario)
