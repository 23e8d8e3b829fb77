"""The status of simulated nodes: summary, readiness, peers and findings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from p2pnode.status.events import EventRing
from p2pnode.status.loop_delay import LoopDelay
from p2pnode.status.report import StatusReport
from tests.harness.stub_trainer import StubTrainer
from tests.harness.swarm import Host, Swarm
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


def report(swarm: Swarm, host: Host) -> StatusReport:
    return StatusReport(host.living, EventRing(), LoopDelay(swarm.clock), keys=lambda: ["ab12"])


def test_the_summary_follows_the_state() -> None:
    """A joining node is not ready; a training one is, and its summary has step and company."""

    async def scenario(swarm: Swarm) -> None:
        host = swarm.start("n0")
        joining = report(swarm, host)
        assert joining.ready() == (False, "joining: starting the trainer and looking for peers")
        assert joining.status().exchange.shards == 0
        await swarm.until(lambda: host.living.progress.step >= 2, within_s=30, what="it trains")

        training = report(swarm, host)
        step = host.living.progress.step
        assert training.ready() == (True, f"training at step {step} with 0 peers; waiting for no peer")
        status = training.status()
        assert status.exchange.shards_owned == status.exchange.shards > 0
        assert (status.swarm.closed, status.swarm.keys) == (True, ["ab12"])
        assert [row["step"] for row in training.steps(1)] == [step]

    simulate(scenario)


def test_peers_are_listed_furthest_ahead_first() -> None:
    """Each peer has its lag behind this node; those ahead come first."""

    async def scenario(swarm: Swarm) -> None:
        hosts = swarm.start_many(3)
        await swarm.until(lambda: all(host.living.progress.step >= 3 for host in hosts), within_s=90, what="all train")
        own = report(swarm, hosts[0])
        peers = own.peers()

        assert len(peers) == 2
        assert [peer.step for peer in peers] == sorted((peer.step for peer in peers), reverse=True)
        assert all(peer.lag == own.status().step - peer.step for peer in peers)

    simulate(scenario, barrier__method="asp")


def test_a_stalled_trainer_is_a_finding() -> None:
    """A hung trainer makes the state stalled and an error under `health`."""

    async def scenario(swarm: Swarm) -> None:
        host = swarm.start("n0")
        await swarm.until(lambda: host.living.progress.step >= 2, within_s=30, what="it trains")
        host.living.progress.stalled = True

        status = report(swarm, host).status()

        assert status.state == "stalled"
        assert [finding.what for finding in status.health if finding.level == "error"] == [
            "the trainer makes no progress"
        ]

    simulate(scenario)
