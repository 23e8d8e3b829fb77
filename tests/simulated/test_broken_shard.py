"""The values of a shard become useless in the memory of its living owner: it goes on with its last good copy."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from tests.harness.long_run import more
from tests.harness.restarts import NODES, SETTINGS, SHARDS, WIDTH, CountingTrainer, counted
from tests.harness.stub_trainer import exponential
from tests.harness.swarm import Host, Swarm
from tests.harness.virtual_loop import VirtualLoop
from training.exchange.store.records import Owned

#: A good copy is found and used within this long.
REPAIRED_S = 5.0


def owner_of(swarm: Swarm, shard: int) -> tuple[Host, Owned]:
    return next(
        (host, owned) for host in swarm.running() if (owned := host.living.exchange.store.owned.get(shard)) is not None
    )


def break_shard(swarm: Swarm, shard: int, parts: str, number: float) -> None:
    """Overwrite the values of a shard in the memory of its owner, and of others that `parts` names."""
    host, owned = owner_of(swarm, shard)
    owned.state.value[1:3] = number
    if "backup" in parts:
        assert owned.backup is not None
        backup = next(one for one in swarm.running() if one.living.identity.node_id == owned.backup.node_id)
        backup.living.exchange.store.backed[shard].state.value[:] = number
    if "replica" in parts:
        host.living.exchange.context.replica.slice_of(shard)[:] = number


async def _scenario(swarm: Swarm, parts: str, number: float, times: int) -> None:
    chance = random.Random(f"{swarm.seed}/break")
    swarm.start_many(NODES)
    await swarm.until(
        lambda: min(host.living.progress.step for host in swarm.running()) >= 5, within_s=60, what="steps everywhere"
    )
    await asyncio.sleep(10.0)
    for _ in range(times):
        shard = chance.randrange(SHARDS)
        host, _ = owner_of(swarm, shard)
        term = host.living.exchange.store.ownership.fence(shard)
        repaired = len(swarm.of("shard_repaired"))
        break_shard(swarm, shard, parts, number)
        await swarm.until(
            lambda before=repaired: len(swarm.of("shard_repaired")) > before,
            within_s=REPAIRED_S,
            what="the shard is repaired",
        )
        steps = [one.living.progress.step for one in swarm.running()]
        await asyncio.sleep(10.0)
        assert all(one.living.progress.step >= before + 5 for one, before in zip(swarm.running(), steps, strict=True))
        _, owned = owner_of(swarm, shard)
        assert owned.term > term
        assert owned.backup is not None
    for one in swarm.running():
        one.living.pause()
    await asyncio.sleep(8.0)


def play(seed: int, parts: str, number: float = np.nan, times: int = 2, **settings: object) -> Swarm:
    """A swarm that trained while shards of it were broken; its values are checked against what was trained."""
    print(f"seed {seed}")
    swarms = []

    async def main() -> None:
        swarm = Swarm(
            seed=seed,
            settings=SETTINGS | settings,
            make_trainer=lambda name: CountingTrainer(name, SHARDS * WIDTH, step_s=exponential(0.5), start_s=0.3),
        )
        swarms.append(swarm)
        try:
            await _scenario(swarm, parts, number, times)
            _check(swarm)
        finally:
            await swarm.stop()

    VirtualLoop().run(main(), limit_s=600)
    return swarms[0]


def _check(swarm: Swarm) -> None:
    trained = np.array([len(swarm.hosts[f"n{place}"].trainer.trained) for place in range(NODES)])
    missing = trained[None, :] - counted(swarm)
    repairs = swarm.of("shard_repaired")
    lost = sum(record.fields["lost"] for record in repairs)
    counters = [host.living.exchange.counters for host in swarm.running()]
    assert (missing.min(), missing.sum()) == (0, lost), f"{missing} {[one.fields for one in repairs]}"
    assert sum(one.lost_in_repairs for one in counters) == lost
    assert sum(one.repaired_shards for one in counters) == len(repairs)
    assert not swarm.of("member_distrusted")
    assert not swarm.of("deltas_lost_in_split")
    for host in swarm.running():
        assert np.isfinite(host.living.exchange.context.replica.vector).all()


@pytest.mark.parametrize(("seed", "number"), [(1, np.nan), *more((1, -np.inf), (2, 3e38), (3, np.nan))])
def test_an_owner_goes_on_with_the_state_of_its_backup(seed: int, number: float) -> None:
    """Within seconds, without a loss; the others go on, and leave nobody out."""
    swarm = play(seed, "owner", number)
    found = swarm.of("shard_repaired")
    assert {record.fields["source"] for record in found} == {"backup"}
    assert [record.fields["lost"] for record in found] == [0] * 2


@pytest.mark.parametrize("seed", [1, *more(2, 3, 4, 5)])
def test_owner_and_backup_go_on_with_what_the_owner_pulled(seed: int) -> None:
    """The deltas since then come from the repair log; nothing is lost, and nothing is added twice."""
    swarm = play(seed, "owner and backup")
    found = swarm.of("shard_repaired")
    assert {record.fields["source"] for record in found} == {"replica"}
    assert [record.fields["lost"] for record in found] == [0] * 2


@pytest.mark.parametrize("seed", [1, *more(2, 3)])
def test_without_a_good_value_of_its_own_an_owner_takes_what_others_pulled(seed: int) -> None:
    """Owner, backup and the owner's replica are broken at once."""
    swarm = play(seed, "owner, backup and replica")
    found = swarm.of("shard_repaired")
    assert {record.fields["source"] for record in found} <= {"replicas", "replica"}
    assert "replicas" in {record.fields["source"] for record in found}


def test_what_no_log_has_is_lost_and_reported() -> None:
    """Without a repair log the deltas since the last pull are counted, and named in the event."""
    swarm = play(3, "owner and backup", **{"exchange.log_seconds": 0.0})
    found = swarm.of("shard_repaired")
    assert sum(record.fields["lost"] for record in found) > 0
    assert all(bool(record.fields["deltas"]) == bool(record.fields["lost"]) for record in found)


def test_a_broken_copy_of_a_backup_is_replaced_by_its_owner() -> None:
    """The owner keeps its shard, and has a good backup soon."""

    async def scenario(swarm: Swarm) -> None:
        swarm.start_many(NODES)
        await swarm.until(
            lambda: min(host.living.progress.step for host in swarm.running()) >= 5, within_s=60, what="steps"
        )
        await asyncio.sleep(10.0)
        host, owned = owner_of(swarm, 0)
        backup = next(one for one in swarm.running() if one.living.identity.node_id == owned.backup.node_id)
        backup.living.exchange.store.backed[0].state.value[:] = np.nan
        await asyncio.sleep(8.0)
        now, owned = owner_of(swarm, 0)
        assert now is host
        assert [record.fields["role"] for record in swarm.of("shard_broken")] == ["backup"]
        keeper = next(one for one in swarm.running() if one.living.identity.node_id == owned.backup.node_id)
        copy = keeper.living.exchange.store.backed[0].state
        assert copy.is_in_range()
        for one in swarm.running():
            one.living.pause()
        await asyncio.sleep(8.0)
        _check(swarm)

    async def main() -> None:
        swarm = Swarm(
            seed=4,
            settings=SETTINGS,
            make_trainer=lambda name: CountingTrainer(name, SHARDS * WIDTH, step_s=exponential(0.5), start_s=0.3),
        )
        try:
            await scenario(swarm)
        finally:
            await swarm.stop()

    VirtualLoop().run(main(), limit_s=600)
