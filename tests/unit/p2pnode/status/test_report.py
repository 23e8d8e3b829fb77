"""The status of simulated nodes: summary, readiness, peers and findings."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from p2pnode.status.events import EventRing
from p2pnode.status.loop_delay import LoopDelay
from p2pnode.status.report import StatusReport
from p2pnode.status.schema import BestStatus
from tests.harness.stub_trainer import StubTrainer
from tests.harness.swarm import Host, Swarm
from tests.harness.virtual_loop import run
from training.trainer_link.interface import Evaluation


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
        assert status.exchange.shards_owned == status.exchange.shards_without_backup == status.exchange.shards > 0
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
            "the trainer makes no progress: silent for longer than training.hang_s = 10, or failing"
        ]

    simulate(scenario)


def test_the_result_is_there_when_the_run_has_ended() -> None:
    """Steps, the best metric in the direction of its name, the model, how to load it; null before."""

    async def scenario(swarm: Swarm) -> None:
        host, other = swarm.start_many(2, training__max_steps=3)
        await swarm.until(lambda: host.living.progress.step >= 1, within_s=60, what="it trains")
        assert host.trainer is not None
        for step, loss in ((1, 0.5), (2, 0.7)):
            host.trainer.measured.append(Evaluation(step, {"loss": loss}, 10))
        before = report(swarm, host).status().result
        await swarm.until(lambda: host.living.result is not None, within_s=60, what="the end")

        result = report(swarm, host).status().result

        assert before is None
        assert result is not None
        assert (result.reason, result.steps, result.may_differ) == ("max_steps", 3, None)
        assert result.best == BestStatus(metric="loss", value=0.5, step=1)
        assert result.model == "model.safetensors"
        assert result.sha256 == hashlib.sha256(host.disk.files["model.safetensors"]).hexdigest()
        assert len(result.load) == 2
        assert other.task is not None

    simulate(scenario, training__min_nodes=2)


@pytest.mark.parametrize(
    ("reported", "what"), [({}, "nothing was evaluated in 50 steps"), ({"loss": 1.0}, "report loss only")]
)
def test_a_goal_that_no_evaluation_can_reach_is_a_finding(reported: dict[str, float], what: str) -> None:
    """A script that reports nothing, or another metric, would train for ever; after the metric there is no finding."""

    async def scenario(swarm: Swarm) -> None:
        host = swarm.start("n0", training__until="accuracy>=0.9", training__eval_steps=10)
        assert host.trainer is not None
        host.trainer.evaluates = False
        if reported:
            host.trainer.measured.append(Evaluation(1, reported, 0))
        await swarm.until(lambda: host.living.progress.step >= 1, within_s=60, what="it trains")
        early = [finding.what for finding in report(swarm, host).status().health if "until" in finding.what]
        await swarm.until(lambda: host.living.progress.step >= 50, within_s=200, what="fifty steps")
        late = [finding.what for finding in report(swarm, host).status().health if "until" in finding.what]
        host.trainer.measured.append(Evaluation(50, {"accuracy": 0.1}, 0))
        await swarm.until(lambda: host.living.progress.step >= 52, within_s=60, what="it is reported")
        after = [finding.what for finding in report(swarm, host).status().health if "until" in finding.what]

        assert len(early) == len(reported)
        assert what in late[0]
        assert after == []

    simulate(scenario)


def test_nodes_on_the_same_data_are_a_finding_on_both() -> None:
    """With the other node's id, and what to do."""

    async def scenario(swarm: Swarm) -> None:
        for name, bootstrap in (("n0", None), ("n1", "n0")):
            host = swarm.start(name, bootstrap=bootstrap)
            assert host.trainer is not None
            host.trainer.name = "twin"
        hosts = list(swarm.hosts.values())
        await swarm.until(lambda: len(swarm.of("same_data")) == 2, within_s=60, what="both know")

        found = [[each for each in report(swarm, host).status().health if "same data" in each.what] for host in hosts]

        assert [len(findings) for findings in found] == [1, 1]
        assert hosts[1].living.overlay.node_id.hex()[:8] in found[0][0].what
        assert "swarm.seed" in found[0][0].do

    simulate(scenario, training__min_nodes=2, barrier__method="bsp")


def test_a_member_that_waits_for_its_swarm_says_so() -> None:
    """While no member answers, `health` names the run, why this node does not open the swarm, and the way out."""

    async def scenario(swarm: Swarm) -> None:
        swarm.start("n0")
        host = swarm.start("n1", bootstrap="n0")
        await swarm.until(lambda: host.living.state == "training", within_s=60, what="both train")
        for name in ("n0", "n1"):
            swarm.hosts[name].living.leave()
        await swarm.until(lambda: not swarm.running(), within_s=30, what="both have left")

        host = swarm.start("n1")
        assert not [finding for finding in report(swarm, host).status().health if "waits" in finding.what]
        await swarm.until(lambda: host.living.waits_for_swarm, within_s=30, what="it waits")

        (finding,) = [finding for finding in report(swarm, host).status().health if "waits" in finding.what]
        assert finding.what == "no member of run default answers; this node waits"
        assert "p2pnode start --reopen" in finding.do

    simulate(scenario)
