"""What `/status` shows of a split: the reach of the log, what awaits repair, what was repaired, what is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from p2pnode.status.events import EventRing
from p2pnode.status.report import LoopDelay, StatusReport
from tests.harness.runner.stories import played_by
from tests.harness.swarms.exact_swarm import simulate
from tests.harness.swarms.swarm import Swarm

SEED = 101
KEYS = ("repair_reach_seconds", "repair_log_bytes", "repaired", "lost_in_splits", "shards_to_mend")


def shown(swarm: Swarm) -> list[dict[str, Any]]:
    """The exchange of each node's status."""
    loop_delay = LoopDelay(swarm.clock)
    return [
        msgspec.structs.asdict(StatusReport(host.living, EventRing(), loop_delay).status().exchange)
        for host in swarm.running()
    ]


async def split(swarm: Swarm, seconds: float) -> dict[str, int]:
    """Four nodes, split two and two for so long, and reconnected; the largest number of each key seen on the way."""
    swarm.start_many(4)
    await swarm.until(lambda: min(swarm.steps()) >= 10, within_s=120, what="ten steps everywhere")
    assert all(one[key] == 0 for one in shown(swarm) for key in ("repaired", "lost_in_splits", "shards_to_mend"))
    hosts = [host.address for host in swarm.running()]
    swarm.network.partition(hosts[:2], hosts[2:])
    await asyncio.sleep(seconds)
    swarm.network.heal()
    most = dict.fromkeys(KEYS, 0)

    def look() -> bool:
        for one in shown(swarm):
            for key in KEYS:
                most[key] = max(most[key], one[key])
        return most["shards_to_mend"] > 0 and not any(one["shards_to_mend"] for one in shown(swarm))

    await swarm.until(look, within_s=60, what="mended")
    await swarm.settle()
    return most


@played_by(simulate, seed=SEED, training__min_nodes=4)
async def test_a_split_within_the_reach_is_shown_as_repaired(swarm: Swarm) -> None:
    """The reach is the time asked for. Shards to be reconciled are counted until they are. The repaired deltas add up
    to those of the events, and nothing is lost."""
    most = await split(swarm, 20.0)

    assert most["repair_reach_seconds"] == 60.0
    assert most["repair_log_bytes"] > 0
    assert most["shards_to_mend"] > 0
    repaired = sum(one["repaired"] for one in shown(swarm))
    assert repaired == sum(record.fields["count"] for record in swarm.of("deltas_repaired")) > 0
    assert [one["lost_in_splits"] for one in shown(swarm)] == [0] * 4
    for host, one in zip(swarm.running(), shown(swarm), strict=True):
        assert one["repair_log_bytes"] == host.exchange.store.log.size_bytes <= 256 * 1024 * 1024


@played_by(simulate, seed=SEED, training__min_nodes=4, exchange__log_seconds=2.0)
async def test_a_split_beyond_the_reach_is_shown_with_what_it_cost(swarm: Swarm) -> None:
    """A log of two seconds is shown as such; after a split of forty the losses are counted as the events name them."""
    most = await split(swarm, 40.0)

    assert most["repair_reach_seconds"] == 2.0
    lost = sum(one["lost_in_splits"] for one in shown(swarm))
    assert lost == sum(record.fields["count"] for record in swarm.of("deltas_lost_in_split")) > 0


@played_by(simulate, seed=SEED, training__min_nodes=3, exchange__log_bytes=8000)
async def test_a_full_log_shows_a_shorter_reach(swarm: Swarm) -> None:
    """Bytes run out before the time asked for: the reach shown is what they last for."""
    swarm.start_many(3)
    await swarm.until(lambda: min(swarm.steps()) >= 40, within_s=240, what="forty steps everywhere")

    for one in shown(swarm):
        assert 0 < one["repair_reach_seconds"] < 60.0
        assert one["repair_log_bytes"] <= 8000
