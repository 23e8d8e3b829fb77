"""The values of a shard become useless in the memory of a living node: it resigns, and its backup takes over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from p2pnode.training.exchange.store.records import Owned
from tests.harness.histories.restarts import NODES, SETTINGS, SHARDS, WIDTH, CountingTrainer, counted
from tests.harness.runner.long_run import more
from tests.harness.swarms import simulated_swarm
from tests.harness.swarms.swarm import Host, Swarm
from tests.harness.trainers.stub_trainer import exponential

#: Another node owns the shard within this long.
TAKEN_OVER_S = 5.0


def play(seed: int, scenario: Callable[[Swarm], Awaitable[None]]) -> Swarm:
    """A swarm of which every shard has a backup. At the end each delta that was trained is in the model once, but for
    those that an era from a replica has refused."""

    async def story(swarm: Swarm) -> None:
        swarm.start_many(NODES)
        await swarm.until(lambda: min(swarm.steps()) >= 5, within_s=60, what="steps")
        await asyncio.sleep(30.0)  # a founder takes nothing over before
        await scenario(swarm)
        await swarm.settle()
        for host in swarm.running():
            assert np.isfinite(host.exchange.replica.vector).all()

    return simulated_swarm.play(
        story,
        lambda: Swarm(
            seed=seed,
            settings=SETTINGS,
            make_trainer=lambda name: CountingTrainer(name, SHARDS * WIDTH, step_s=exponential(0.5), start_s=0.3),
        ),
    )


def check_counts(swarm: Swarm) -> None:
    trained = np.array([len(swarm.hosts[f"n{place}"].trainer.trained) for place in range(NODES)])
    assert (trained[None, :] == counted(swarm)).all()


async def taken_over(swarm: Swarm, shard: int, former: Host) -> Owned:
    """The shard has another owner, and soon another backup; all train on."""

    await swarm.until(
        lambda: swarm.owners(shard) and swarm.owner(shard) is not former,
        within_s=TAKEN_OVER_S,
        what="another node owns the shard",
    )
    await trains_on(swarm)
    assert swarm.owned(shard).backup is not None
    return swarm.owned(shard)


async def trains_on(swarm: Swarm) -> None:
    """Every node makes five steps in ten seconds."""
    before = swarm.steps()
    await asyncio.sleep(10.0)
    assert all(now >= then + 5 for now, then in zip(swarm.steps(), before, strict=True))


@pytest.mark.parametrize("number", [np.nan, *more(3e38)])
def test_backups_take_over_what_is_broken(number: float) -> None:
    """First a copy of a backup breaks: its owner has a good one soon. Then a shard, and then all shards of a node, as
    where its memory fails: each backup takes over within seconds, under a higher term, without a loss; nobody is left
    out."""

    async def scenario(swarm: Swarm) -> None:
        host = swarm.owner()
        swarm.backup().exchange.store.backed[0].state.value[:] = number
        await asyncio.sleep(8.0)
        assert swarm.owner() is host
        assert swarm.backup().exchange.store.backed[0].state.is_in_range()
        assert not swarm.of("shard_resigned")

        backup, term = swarm.backup(), swarm.owned().term
        swarm.owned().state.value[1:3] = number
        present = await taken_over(swarm, 0, host)
        assert present.term > term
        assert [one.node for one in swarm.of("shards_taken_over")][-1] == backup.name

        await asyncio.sleep(5.0)
        broken = swarm.owner().exchange.store.owned.copy()
        terms = {shard: owned.term for shard, owned in broken.items()}
        for owned in broken.values():
            owned.state.value[:] = number
        await swarm.until(
            lambda: all(swarm.owners(shard) and swarm.owned(shard).term > term for shard, term in terms.items()),
            within_s=TAKEN_OVER_S,
            what="other nodes own the shards",
        )
        await trains_on(swarm)
        await swarm.settle()
        check_counts(swarm)

    swarm = play(1, scenario)
    assert len(swarm.of("copy_broken")) >= 1
    assert {"shard": 0} in [record.fields for record in swarm.of("shard_resigned")]
    assert not swarm.of("member_quarantined")


def test_where_owner_and_backup_are_broken_a_replica_goes_on() -> None:
    """As after the death of both."""

    async def scenario(swarm: Swarm) -> None:
        backup = swarm.backup()
        swarm.owned().state.value[1:3] = np.nan
        backup.exchange.store.backed[0].state.value[:] = np.nan

        def goes_on() -> bool:
            state = swarm.owned().state if swarm.owners() else None
            return state is not None and state.era_step > 0 and state.is_in_range()

        await swarm.until(goes_on, within_s=2 * TAKEN_OVER_S, what="a replica goes on")
        await trains_on(swarm)

    swarm = play(1, scenario)
    assert swarm.of("shard_resigned")
