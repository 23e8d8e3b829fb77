"""Owner and backup of a shard die before there is a new backup, and come back on other ports, as daemons do."""

from __future__ import annotations

import asyncio
import random

import pytest

from p2pnode.lifecycle.node import Node
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.long_run import more
from tests.harness.runner.stories import run_by
from tests.harness.swarms.exact_swarm import EXACT, SHARDS, SIZE
from tests.harness.swarms.swarm import Swarm
from tests.harness.trainers.stub_trainer import StubTrainer, exponential

#: Detection, the grace period for a backup and a survey; and a push that fails first, for nobody notices before.
BOUND_S = 10.0


def exchanging(swarm: Swarm) -> list[Node]:
    """The running nodes whose exchange has begun."""
    return [host.living for host in swarm.running() if host.exchange is not None]


def ownerless(swarm: Swarm) -> set[int]:
    return set(range(SHARDS)) - {shard for node in exchanging(swarm) for shard in node.exchange.store.owned}


def a_pair(swarm: Swarm) -> list[str]:
    """Owner and backup of one shard, by name."""
    names = {host.living.identity.node_id: host.name for host in swarm.running()}
    owned = [
        (names[node.identity.node_id], names[one.backup.node_id])
        for node in exchanging(swarm)
        for one in node.exchange.store.owned.values()
        if one.backup is not None
    ]
    return list(random.Random(f"{swarm.seed}/pair").choice(sorted(owned)))


@pytest.mark.parametrize(("seed", "start_s"), [(3, 0.8), *more((5, 90.0))])
@pytest.mark.promise(2)
@run_by(run, limit_s=3600)
async def test_a_shard_whose_owner_and_backup_die_goes_on_from_a_replica(seed: int, start_s: float) -> None:
    """Three workers of five are killed one after the other and started again, with a trainer that starts soon or late;
    a master takes part. The others take every shard over within the bound, the log says that a replica was used, and
    those that came back train."""
    print(f"seed {seed}")

    async def scenario(swarm: Swarm) -> None:
        swarm.new_ports = True
        swarm.start_many(5)
        swarm.start("m", bootstrap="n0", node__role="master", dispatch__source="master")
        await swarm.until(
            lambda: len(nodes := exchanging(swarm)) == 5 and min(node.progress.step for node in nodes) >= 8,
            within_s=60,
            what="five nodes train",
        )
        pair = a_pair(swarm)
        victims = [*pair, next(host.name for host in swarm.running() if host.name not in (*pair, "m"))]

        async def kill_and_start_again(place: int, name: str) -> None:
            await asyncio.sleep(1.0 * place)
            await swarm.kill(name)
            await asyncio.sleep(3.5)
            others = [host.name for host in swarm.running() if host.name != "m"]
            swarm.start(name, bootstrap=others[seed % len(others)])

        await asyncio.gather(*(kill_and_start_again(place, name) for place, name in enumerate(victims)))
        await swarm.until(lambda: not ownerless(swarm), within_s=BOUND_S, what="an owner for each shard")
        await swarm.until(
            lambda: all(host.living.phase in ("training", "serving") for host in swarm.running()),
            within_s=start_s + 10.0,
            what="those that came back train",
        )
        await swarm.kill("m")
        await swarm.settle()
        swarm.model()
        assert sum(record.fields["from_replica"] for record in swarm.of("shards_taken_over")) >= 1

    starts = dict.fromkeys(("m", *(f"n{number}" for number in range(5))), 0)

    def make_trainer(name: str) -> StubTrainer:
        starts[name] += 1
        return StubTrainer(name, SIZE, step_s=exponential(0.3), start_s=0.8 if starts[name] == 1 else start_s)

    settings = {**EXACT, "barrier.method": "asp", "training.checkpoint_s": 1.0}
    swarm = Swarm(seed=seed, settings=settings, make_trainer=make_trainer)
    try:
        await scenario(swarm)
    finally:
        await swarm.stop()
