"""What needs attention on a node, of simulated nodes: each finding is there while its cause is, and no longer."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from p2pnode import __version__
from p2pnode.overlay.ids import short
from p2pnode.status.health import ENDING, LONG_WAIT_S
from p2pnode.training.exchange.run_state import COUNTED_FACTOR, LASTING_S
from p2pnode.training.supervisor.gpu_monitor import GpuReading
from p2pnode.training.trainer_link.interface import Evaluation
from tests.harness.network.nat import Nat
from tests.harness.runner.stories import Fixture, played_by
from tests.harness.swarms.status_swarm import report, simulate
from tests.harness.swarms.swarm import Host, Swarm


@played_by(simulate)
async def test_a_peer_of_another_release_is_a_finding_for_information(swarm: Swarm) -> None:
    """It says how many peers run what; the state of the node stays as it is."""
    hosts = swarm.start_many(2)
    await swarm.until(lambda: all(host.living.progress.step >= 2 for host in hosts), within_s=90, what="all train")
    own = report(swarm, hosts[0])
    assert not any("release" in finding.what for finding in own.status().health)
    hosts[1].living.overlay.local.version = "99.1.0"
    await swarm.until(lambda: own.peers()[0].version == "99.1.0", within_s=60, what="it is said")
    (said,) = [finding for finding in own.status().health if "release" in finding.what]
    assert (said.level, own.status().state) == ("info", "training")
    assert said.what == f"1 of 1 peers run another release than this node ({__version__}): 1 × 99.1.0"


@played_by(simulate)
async def test_a_failed_trainer_is_a_finding_until_it_trains_again(swarm: Swarm) -> None:
    """With the reason and what to do, which may be that of a GPU."""
    host = swarm.start("n0")
    await swarm.until(lambda: host.living.progress.step >= 2, within_s=30, what="it trains")
    host.living.progress.trainer_failure = "the GPU has too little memory", "lower the batch size"

    (finding,) = [one for one in report(swarm, host).status().health if one.level == "error"]

    assert finding.what == "the trainer has failed: the GPU has too little memory"
    assert finding.do == "lower the batch size"


@played_by(simulate)
async def test_a_gpu_is_shown_as_its_driver_reads_it(swarm: Swarm) -> None:
    """An error that the driver has reported is a finding."""
    host = swarm.start("n0")
    await swarm.until(lambda: host.living.progress.step >= 2, within_s=30, what="it trains")
    assert report(swarm, host).status().gpus == []
    host.living.gpus.readings = {"cuda:0": GpuReading("H100", 3, 8, 0.5, 61.0, "Xid 79: it is gone")}

    status = report(swarm, host).status()

    assert msgspec.to_builtins(status.gpus) == [
        {
            "device": "cuda:0",
            "name": "H100",
            "memory_used_bytes": 3,
            "memory_total_bytes": 8,
            "utilisation": 0.5,
            "temperature_celsius": 61.0,
            "error": "Xid 79: it is gone",
        }
    ]
    assert "cuda:0 (H100): Xid 79: it is gone" in [finding.what for finding in status.health]


@played_by(simulate)
async def test_a_stalled_trainer_is_a_finding(swarm: Swarm) -> None:
    """A hung trainer makes the state stalled and an error under `health`."""
    host = swarm.start("n0")
    await swarm.until(lambda: host.living.progress.step >= 2, within_s=30, what="it trains")
    host.living.progress.stalled = True

    status = report(swarm, host).status()

    assert status.state == "stalled"
    assert [finding.what for finding in status.health if finding.level == "error"] == [
        "the trainer makes no progress: it is silent, or failing"
    ]


@pytest.mark.parametrize(
    ("reported", "what"), [({}, "nothing was evaluated in 50 steps"), ({"loss": 1.0}, "report loss only")]
)
@played_by(simulate)
async def test_a_goal_that_no_evaluation_can_reach_is_a_finding(
    swarm: Swarm, *, reported: dict[str, float], what: str
) -> None:
    """A script that reports nothing, or another metric, would train for ever; after the metric there is no finding."""
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


@played_by(simulate, training__min_nodes=2, barrier__method="bsp")
async def test_nodes_on_the_same_data_are_a_finding_on_both(swarm: Swarm) -> None:
    """With the other node's id, and what to do."""
    for name, bootstrap in (("n0", None), ("n1", "n0")):
        host = swarm.start(name, bootstrap=bootstrap)
        assert host.trainer is not None
        host.trainer.batches = "same"
    hosts = list(swarm.hosts.values())
    await swarm.until(lambda: len(swarm.of("same_data")) == 2, within_s=60, what="both know")

    found = [[each for each in report(swarm, host).status().health if "same data" in each.what] for host in hosts]

    assert [len(findings) for findings in found] == [1, 1]
    assert hosts[1].living.overlay.node_id.hex()[:8] in found[0][0].what
    assert "swarm.seed" in found[0][0].do
    await swarm.kill("n1")
    await swarm.until(lambda: not hosts[0].living.overlay.peers, within_s=60, what="it is found dead")
    assert not [each for each in report(swarm, hosts[0]).status().health if "same data" in each.what]


@played_by(simulate)
async def test_a_member_that_waits_for_its_swarm_says_so(swarm: Swarm) -> None:
    """While no member answers, `health` names the run, why this node does not open the swarm, and the way out."""
    swarm.start("n0")
    host = swarm.start("n1", bootstrap="n0")
    await swarm.until(lambda: host.living.state == "training", within_s=60, what="both train")
    for name in ("n0", "n1"):
        swarm.hosts[name].living.leave()
    await swarm.until(lambda: not swarm.running(), within_s=30, what="both have left")

    host = swarm.start("n1")
    assert not [finding for finding in report(swarm, host).status().health if "waits" in finding.what]
    await swarm.until(lambda: host.living.entry.waits_for_swarm, within_s=30, what="it waits")

    (finding,) = [finding for finding in report(swarm, host).status().health if "waits" in finding.what]
    assert finding.what == "no member of run default answers; this node waits"
    assert "p2pnode start --reopen" in finding.do


def found(swarm: Swarm, host: Host, words: str) -> list[str]:
    """The findings of a node with these words."""
    return [finding.what for finding in report(swarm, host).status().health if words in finding.what]


@played_by(simulate, barrier__method="asp")
async def test_a_node_without_peers_says_whom_it_lost_and_when(swarm: Swarm) -> None:
    """In the summary, as a finding and under `lost`, until the peer is back; before there was a loss, nothing."""
    host, other = swarm.start_many(2)
    await swarm.until(lambda: host.living.state == "training", within_s=60, what="both train")
    asked = report(swarm, host)  # kept: it remembers what happens from now on
    id_of_other = other.living.overlay.node_id.hex()
    assert asked.status().lost == []
    await swarm.kill("n1")
    await swarm.until(lambda: not host.living.overlay.peers, within_s=60, what="it is found dead")
    await asyncio.sleep(12.0)

    status = asked.status()
    (lost,) = status.lost
    assert (lost.id, lost.how) == (id_of_other, "dead")
    assert 12.0 <= lost.seconds_ago < 14.0
    assert f"0 peers ({id_of_other[:8]} was lost 12 s ago)" in status.summary
    assert [each.what for each in status.health if "no peer is left" in each.what] == [
        f"no peer is left: {id_of_other[:8]} was lost 12 s ago ({lost.reason})"
    ]

    swarm.start("n1", bootstrap="n0")
    await swarm.until(lambda: bool(host.living.overlay.peers), within_s=60, what="it is back")
    status = asked.status()
    assert (status.lost, [each for each in status.health if "no peer" in each.what]) == ([], [])


@played_by(simulate)
async def test_deltas_that_wait_are_a_finding_only_when_they_wait_long(swarm: Swarm) -> None:
    """Not the moment that every push takes; and it goes when the owner has them."""
    host = swarm.start("n0")
    await swarm.until(lambda: host.living.progress.step >= 1, within_s=30, what="it trains")
    assert host.living.exchange is not None
    waiting: dict[int, Any] = host.living.exchange.sent.deliveries
    now = swarm.clock.monotonic()
    for age_s, findings in ((0.9, 0), (LONG_WAIT_S - 0.5, 0), (LONG_WAIT_S + 2.0, 1)):
        waiting[5] = SimpleNamespace(since=now - age_s, unacknowledged={})
        assert len(found(swarm, host, "wait for their owners")) == findings
    assert found(swarm, host, "wait for") == ["deltas of 1 steps wait for their owners, one for 12 s"]
    waiting.clear()
    assert found(swarm, host, "wait for their owners") == []


@played_by(simulate)
async def test_a_member_that_counts_other_nodes_for_long_is_a_finding(swarm: Swarm) -> None:
    """With both counts; not one that is gone, and no longer once both agree."""
    host, other = swarm.start_many(2)
    await swarm.until(lambda: len(host.living.overlay.peers) == 1, within_s=30, what="they know each other")
    view = host.living.exchange.view
    await swarm.until(lambda: view.worker_count() == 2.0, within_s=30, what="both train")
    node, counts = other.living.overlay.node_id, view.counts
    for now in (0.0, LASTING_S):
        for one in (node, b"x" * 20):
            counts.note(one, 6.0, 2.0, COUNTED_FACTOR, now)
    assert found(swarm, host, "nodes that train") == [f"{short(node)} counts 6 nodes that train, this one 2"]
    step = host.living.progress.step
    await swarm.until(lambda: host.living.progress.step > step + 2, within_s=30, what="the other one pushes")
    assert found(swarm, host, "nodes that train") == []


@played_by(simulate)
async def test_shards_that_broke_in_memory_are_a_finding(swarm: Swarm) -> None:
    """An error, for nothing else says that this machine's memory fails."""
    host = swarm.start("n0")
    await swarm.until(lambda: host.living.progress.step >= 1, within_s=30, what="it trains")
    assert found(swarm, host, "no training makes") == []
    host.living.exchange.counters.shards_resigned = 2
    assert found(swarm, host, "no training makes") == [
        "2 shards of this node had values that no training makes, and were left to their backups"
    ]


@played_by(simulate, barrier__method="asp")
async def test_bootstraps_that_failed_are_a_finding_until_there_is_a_peer(swarm: Swarm) -> None:
    """With what to do about the very reason; a node that others have found needs no bootstrap any more, and one at its
    end, whose peers have left before it, does not either."""
    host, _ = swarm.start_many(2)
    await swarm.until(lambda: host.living.state == "training", within_s=60, what="both train")
    host.living.overlay.failures["old:1"] = "refused the connection: no process listens there"
    assert found(swarm, host, "bootstrap") == []
    await swarm.kill("n1")
    await swarm.until(lambda: not host.living.overlay.peers, within_s=60, what="it is found dead")
    (finding,) = [each for each in report(swarm, host).status().health if "old:1" in each.what]
    assert "node.port" in finding.do
    for phase in ENDING:
        host.living.phase = phase
        assert found(swarm, host, "bootstrap") == []
    host.living.phase = "training"


@pytest.mark.parametrize(("method", "does"), [("pssp", "trains by itself since step"), ("bsp", "waits")])
@played_by(simulate, barrier__method=Fixture("method"), training__checkpoint_s=5.0)
async def test_a_node_without_an_owner_in_reach_says_since_when_and_what_to_do(swarm: Swarm, *, does: str) -> None:
    """Whom it has lost, whether it trains or waits, and why the address of its bootstrap does not help. Nothing else is
    said of deltas that wait. It goes with its cause."""
    swarm.start("n0")
    swarm.network.behind(Nat("203.0.113.1"), "192.168.1.2")
    host = swarm.start("h1", bootstrap="n0", address="192.168.1.2")
    await swarm.until(lambda: host.living.progress.step >= 4, within_s=60, what="it trains")
    own = report(swarm, host)
    lost = swarm.hosts["n0"].living.overlay.node_id.hex()[:8]
    await swarm.kill("n0")
    await swarm.until(lambda: host.living.exchange.directory.is_apart(), within_s=20, what="it is missed")
    await asyncio.sleep(2 * LONG_WAIT_S)
    said = [finding for finding in own.status().health if "can join" not in finding.what]

    (apart,) = [finding for finding in said if "can own shards" in finding.what]
    assert re.match(rf"no node that can own shards is in reach for \d+ s: {lost} was lost \d\d s ago", apart.what)
    assert f"this node {does}" in apart.what
    assert "with its state directory" in apart.do
    assert "--reopen" in apart.do
    assert not [finding for finding in said if "wait for their owners" in finding.what]
    assert [finding for finding in said if finding.what.startswith("bootstrap 10.0.0.2:8468: refused")]

    swarm.start("n0")
    await swarm.until(
        lambda: not any("can own shards" in finding.what for finding in own.status().health),
        within_s=30,
        what="it is back",
    )
