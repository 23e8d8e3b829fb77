"""The values of a shard become useless in the memory of its living owner: it goes on with its last good copy."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import numpy as np
import pytest

from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.histories.restarts import NODES, SETTINGS, SHARDS, WIDTH, CountingTrainer, counted
from tests.harness.runner.long_run import more
from tests.harness.swarms.swarm import Host, Swarm, configured
from tests.harness.trainers.stub_trainer import exponential
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
    if "every copy" in parts:
        for one in swarm.running():
            exchange = one.living.exchange
            exchange.context.replica.slice_of(shard)[:] = number
            if (backed := exchange.store.backed.get(shard)) is not None and backed.state is not None:
                backed.state.value[:] = number
    if "replica" in parts:
        host.living.exchange.context.replica.slice_of(shard)[:] = number


async def _scenario(swarm: Swarm, parts: str, number: float, times: int, spoil: Callable[[Swarm], None] | None) -> None:
    chance = random.Random(f"{swarm.seed}/break")
    swarm.start_many(NODES)
    await swarm.until(
        lambda: min(host.living.progress.step for host in swarm.running()) >= 5, within_s=60, what="steps everywhere"
    )
    await asyncio.sleep(10.0)
    if spoil is not None:
        spoil(swarm)
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
    assert "misbehaved" not in [record.fields["reason"] for record in swarm.of("member_unreliable")]
    for one in swarm.running():
        one.living.pause()
    await asyncio.sleep(8.0)


def play(
    seed: int,
    parts: str,
    number: float = np.nan,
    times: int = 1,
    spoil: Callable[[Swarm], None] | None = None,
    **settings: object,
) -> Swarm:
    """A swarm that trained while shards of it were broken; its values are checked against what was trained. `spoil`:
    what happens to the machines before."""
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
            await _scenario(swarm, parts, number, times, spoil)
            refused = sum(host.living.exchange.counters.refused_here.get("before_era", 0) for host in swarm.running())
            _check(swarm, refused)
        finally:
            await swarm.stop()

    VirtualLoop().run(main(), limit_s=600)
    return swarms[0]


def _check(swarm: Swarm, refused: int = 0) -> None:
    """What the values lack is what was reported as lost, less what was sent again, and at most what was refused."""
    trained = np.array([len(swarm.hosts[f"n{place}"].trainer.trained) for place in range(NODES)])
    missing = trained[None, :] - counted(swarm, SHARDS)
    repairs = swarm.of("shard_repaired")
    lost = sum(record.fields["lost"] for record in repairs)
    counters = [host.living.exchange.counters for host in swarm.running()]
    assert missing.min() == 0
    again = sum(record.fields["count"] for record in swarm.of("deltas_sent_again"))
    assert lost - again <= missing.sum() <= lost - again + refused, (
        f"{again} {missing} {[one.fields for one in repairs]}"
    )
    assert sum(one.lost_in_repairs for one in counters) == lost
    assert sum(one.repaired_shards for one in counters) == len(repairs)
    assert not swarm.of("member_distrusted")
    assert not swarm.of("deltas_lost_in_split")
    for host in swarm.running():
        assert np.isfinite(host.living.exchange.context.replica.vector).all()


@pytest.mark.parametrize(
    ("seed", "number", "times"), [(1, np.nan, 1), *more((1, -np.inf, 2), (2, 3e38, 2), (3, np.nan, 2))]
)
def test_an_owner_goes_on_with_the_state_of_its_backup(seed: int, number: float, times: int) -> None:
    """Within seconds, without a loss; the others go on, and leave nobody out."""
    swarm = play(seed, "owner", number, times)
    found = swarm.of("shard_repaired")
    assert {record.fields["source"] for record in found} == {"backup"}
    assert [record.fields["lost"] for record in found] == [0] * times


@pytest.mark.parametrize(("seed", "times"), [(1, 1), *more((2, 2), (3, 2), (4, 2), (5, 2))])
def test_owner_and_backup_go_on_with_what_the_owner_pulled(seed: int, times: int) -> None:
    """The deltas since then come from the repair log; nothing is lost, and nothing is added twice."""
    swarm = play(seed, "owner and backup", times=times)
    found = swarm.of("shard_repaired")
    assert {record.fields["source"] for record in found} == {"replica"}
    assert [record.fields["lost"] for record in found] == [0] * times


@pytest.mark.parametrize(("seed", "times"), [(1, 1), *more((2, 2), (3, 2))])
def test_without_a_good_value_of_its_own_an_owner_takes_what_others_pulled(seed: int, times: int) -> None:
    """Owner, backup and the owner's replica are broken at once."""
    swarm = play(seed, "owner, backup and replica", times=times)
    found = swarm.of("shard_repaired")
    assert {record.fields["source"] for record in found} <= {"replicas", "replica"}
    assert "replicas" in {record.fields["source"] for record in found}


CHECKPOINTS = {"training.checkpoint_s": 3.0, "training.keep_checkpoints": 3}


def forget_states(swarm: Swarm) -> None:
    """The checkpoints have the vector only: no shard that a node owned or backed up. No new one is written."""
    for host in swarm.running():
        for name in host.disk.names("checkpoints"):
            if "/states-" in name:
                host.disk.remove(name)
        host.living.checkpoints._config = configured({"training.checkpoint_s": 0.0})


def forget_lists(swarm: Swarm) -> None:
    """Nor do they say which deltas the vector has."""
    forget_states(swarm)
    for host in swarm.running():
        for name in host.disk.names("checkpoints"):
            if name.endswith("deltas.msgpack"):
                host.disk.remove(name)


@pytest.mark.parametrize(
    ("seed", "spoil", "is_lossless", "times"),
    [
        (1, None, True, 1),
        (2, forget_states, True, 1),
        (3, forget_lists, False, 1),
        *more((4, None, True, 2), (5, forget_states, True, 2)),
    ],
)
def test_without_any_good_copy_in_memory_an_owner_goes_back_to_its_checkpoint(
    seed: int, spoil: Callable[[Swarm], None] | None, is_lossless: bool, times: int
) -> None:
    """The values are broken in the memory of every node. The deltas since the checkpoint come from the owner's log.
    Where nothing says which deltas the checkpoint has, those since then are lost, and counted; those under way are
    refused."""
    swarm = play(seed, "owner, every copy", times=times, spoil=spoil, **CHECKPOINTS)
    found = swarm.of("shard_repaired")
    assert {record.fields["source"] for record in found} == {"checkpoint"}
    assert (sum(record.fields["lost"] for record in found) == 0) is is_lossless


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
