"""What takes long on a node, how far it is, and the time to go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from p2pnode.status.schema import Ongoing
from tests.harness.swarms.status_swarm import report, simulate
from tests.harness.swarms.swarm import Host, Swarm


def test_what_takes_long_says_how_far_it_is_and_the_time_to_go() -> None:
    """The join, the nodes that are missing, the download of the state, the steps and the last checkpoint."""
    seen: dict[str, list[Ongoing]] = {}

    async def scenario(swarm: Swarm) -> None:
        host = swarm.start("n0", training__max_steps=200)

        def watch(of: Host) -> bool:
            for each in report(swarm, of).status().progress:
                seen.setdefault(each.what, []).append(each)
            return False

        async def observed(of: Host, until: Callable[[], bool], what: str) -> None:
            await swarm.until(lambda: watch(of) or until(), within_s=90, what=what, every_s=0.01)

        await observed(host, lambda: host.living.phase == "waiting_for_nodes", "it waits")
        await asyncio.sleep(0.1)
        watch(host)
        other = swarm.start("n1", bootstrap="n0", training__max_steps=200)
        await observed(other, lambda: other.living.progress.step >= 5, "it trains")
        other.living.leave()
        node = other.living
        await observed(other, lambda: node.phase == "leaving", "it leaves")
        await swarm.until(lambda: watch(other) or node.checkpoints is None or node.checkpoints._work is None,
                          within_s=30, what="it has saved", every_s=0.001)  # fmt: skip

    simulate(scenario, training__min_nodes=2, training__checkpoint_s=60.0)

    assert (seen["nodes"][0].done, seen["nodes"][0].total, seen["nodes"][0].unit) == (1, 2, "nodes")
    steps = seen["max_steps"][-1]
    assert (steps.total, steps.unit) == (200, "steps")
    assert steps.left_seconds is not None
    assert steps.left_seconds > 0
    download = seen["download of the state"][-1]
    assert (download.unit, download.total % 4) == ("bytes", 0)
    assert 0 <= download.done <= download.total
    assert {"join the swarm", "start the trainer", "join"} & set(seen)
    assert all(each.done <= each.total or not each.total for rows in seen.values() for each in rows)
    print(sorted(seen))


@pytest.mark.parametrize(
    ("is_script", "what", "summary"),
    [
        (True, "wait until the script calls p2pnode.attach", "has not called p2pnode.attach"),
        (False, "start the trainer", "starting the trainer"),
    ],
)
def test_a_node_says_that_it_waits_for_the_script_to_attach(is_script: bool, what: str, summary: str) -> None:
    """A script may read data for minutes before it attaches, or forget to; the trainer of a task is p2pnode's own."""

    async def scenario(swarm: Swarm) -> None:
        host = swarm.start("n0")
        assert host.trainer is not None
        host.trainer.is_script = is_script
        host.trainer._start_s = 100.0
        await swarm.until(lambda: host.living.overlay.genesis is not None, within_s=30, what="it is in the swarm")
        await asyncio.sleep(5.0)
        [row] = report(swarm, host).status().progress
        assert row.what == what
        assert summary in report(swarm, host).status().summary

        host.trainer._start_s = 0.0
        await swarm.until(lambda: host.living.progress.step >= 1, within_s=120, what="it trains")
        assert "attach" not in report(swarm, host).status().summary

    simulate(scenario)
