"""Simulated nodes with stub trainers, and the status of each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from p2pnode.status.events import EventRing
from p2pnode.status.report import LoopDelay, StatusReport
from tests.harness.environment.virtual_loop import run
from tests.harness.swarms.swarm import Host, Swarm
from tests.harness.trainers.stub_trainer import StubTrainer


def simulate(
    scenario: Callable[[Swarm], Awaitable[None]],
    *,
    make_trainer: Callable[[str], StubTrainer] = StubTrainer,
    **settings: Any,
) -> None:
    """Run a scenario on a simulated network with stub trainers. A setting's name has __ for its point."""

    async def main() -> None:
        keys = {key.replace("__", "."): value for key, value in settings.items()}
        swarm = Swarm(seed=5, settings=keys, make_trainer=make_trainer)
        try:
            await scenario(swarm)
        finally:
            await swarm.stop()

    run(main(), limit_s=600)


def report(swarm: Swarm, host: Host) -> StatusReport:
    return StatusReport(host.living, EventRing(), LoopDelay(swarm.clock), keys=lambda: ["ab12"])
