"""The values of a shard become useless in the memory of a living node: it resigns, and its backup takes over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from p2pnode.training.exchange.store.records import Owned
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.histories.restarts import NODES, SETTINGS, SHARDS, WIDTH, CountingTrainer, counted
from tests.harness.runner.long_run import more
from tests.harness.swarms.swarm import Host, Swarm
from tests.harness.trainers.stub_trainer import exponential

#: Another node owns the shard within this long.
TAKEN_OVER_S = 5.0


def owner_of(swarm: Swarm, shard: int) -> tuple[Host, Owned] | None:
    found = [
        (host, owned) for host in swarm.running() if (owned := host.living.exchange.store.owned.get(shard)) is not None
    ]
    return max(found, key=lambda one: one[1].term, default=None)


def backup_of(swarm: Swarm, owned: Owned) -> Host:
    assert owned.backup is not None
    return next(one for one in swarm.running() if one.living.identity.node_id == owned.backup.node_id)


async def settle(swarm: Swarm) -> None:
    for one in swarm.running():
        one.living.pause()
    await asyncio.sleep(8.0)


def play(seed: int, scenario: Callable[[Swarm], Awaitable[None]]) -> Swarm:
    """A swarm of which every shard has a backup. At the end each delta that was trained is in the model once, but for
    those that an era from a replica has refused."""
    print(f"seed {seed}")
    swarms = []

    async def main() -> None:
        swarm = Swarm(
            seed=seed,
            settings=SETTINGS,
            make_trainer=lambda name: CountingTrainer(name, SHARDS * WIDTH, step_s=exponential(0.5), start_s=0.3),
        )
        swarms.append(swarm)
        try:
            swarm.start_many(NODES)
            await swarm.until(
                lambda: min(host.living.progress.step for host in swarm.running()) >= 5, within_s=60, what="steps"
            )
            await asyncio.sleep(30.0)  # a founder takes nothing over before
            await scenario(swarm)
            await settle(swarm)
            for host in swarm.running():
                assert np.isfinite(host.living.exchange.replica.vector).all()
        finally:
            await swarm.stop()

    VirtualLoop().run(main(), limit_s=600)
    return swarms[0]


def check_counts(swarm: Swarm) -> None:
    trained = np.array([len(swarm.hosts[f"n{place}"].trainer.trained) for place in range(NODES)])
    assert (trained[None, :] == counted(swarm)).all()


async def taken_over(swarm: Swarm, shard: int, former: Host) -> Owned:
    """The shard has another owner, and soon another backup; all train on."""

    def has_another() -> bool:
        found = owner_of(swarm, shard)
        return found is not None and found[0] is not former

    await swarm.until(has_another, within_s=TAKEN_OVER_S, what="another node owns the shard")
    steps = [one.living.progress.step for one in swarm.running()]
    await asyncio.sleep(10.0)
    assert all(one.living.progress.step >= before + 5 for one, before in zip(swarm.running(), steps, strict=True))
    found = owner_of(swarm, shard)
    assert found is not None
    assert found[1].backup is not None
    return found[1]


@pytest.mark.parametrize("number", [np.nan, *more(3e38)])
def test_the_backup_of_a_broken_shard_takes_over(number: float) -> None:
    """Within seconds, under a higher term, without a loss; nobody is left out."""

    async def scenario(swarm: Swarm) -> None:
        host, owned = owner_of(swarm, 0) or pytest.fail("nobody owns it")
        backup, term = backup_of(swarm, owned), owned.term
        owned.state.value[1:3] = number
        present = await taken_over(swarm, 0, host)
        assert present.term > term
        assert [one.node for one in swarm.of("shards_taken_over")][-1] == backup.name
        await settle(swarm)
        check_counts(swarm)

    swarm = play(1, scenario)
    assert [record.fields for record in swarm.of("shard_resigned")] == [{"shard": 0}]
    assert not swarm.of("member_quarantined")


def test_all_shards_of_a_node_may_break_at_once() -> None:
    """As where its memory fails: each backup takes over, and the node is not left out."""

    async def scenario(swarm: Swarm) -> None:
        host, _ = owner_of(swarm, 0) or pytest.fail("nobody owns it")
        broken = host.living.exchange.store.owned.copy()
        for owned in broken.values():
            owned.state.value[:] = np.nan
        terms = {shard: owned.term for shard, owned in broken.items()}

        def have_others() -> bool:
            found = {shard: owner_of(swarm, shard) for shard in terms}
            return all(one is not None and one[1].term > terms[shard] for shard, one in found.items())

        await swarm.until(have_others, within_s=TAKEN_OVER_S, what="other nodes own the shards")
        await asyncio.sleep(10.0)
        await settle(swarm)
        check_counts(swarm)

    swarm = play(1, scenario)
    assert not swarm.of("member_quarantined")


def test_where_owner_and_backup_are_broken_a_replica_goes_on() -> None:
    """As after the death of both."""

    async def scenario(swarm: Swarm) -> None:
        _, owned = owner_of(swarm, 0) or pytest.fail("nobody owns it")
        backup = backup_of(swarm, owned)
        owned.state.value[1:3] = np.nan
        backup.living.exchange.store.backed[0].state.value[:] = np.nan

        def goes_on() -> bool:
            found = owner_of(swarm, 0)
            return found is not None and found[1].state.era_step > 0 and found[1].state.is_in_range()

        await swarm.until(goes_on, within_s=2 * TAKEN_OVER_S, what="a replica goes on")
        steps = [one.living.progress.step for one in swarm.running()]
        await asyncio.sleep(10.0)
        assert all(one.living.progress.step >= before + 5 for one, before in zip(swarm.running(), steps, strict=True))

    swarm = play(1, scenario)
    assert swarm.of("shard_resigned")


def test_a_broken_copy_of_a_backup_is_replaced_by_its_owner() -> None:
    """The owner keeps its shard, and has a good backup soon."""

    async def scenario(swarm: Swarm) -> None:
        host, owned = owner_of(swarm, 0) or pytest.fail("nobody owns it")
        backup_of(swarm, owned).living.exchange.store.backed[0].state.value[:] = np.nan
        await asyncio.sleep(8.0)
        found = owner_of(swarm, 0)
        assert found is not None
        assert found[0] is host
        assert backup_of(swarm, found[1]).living.exchange.store.backed[0].state.is_in_range()
        await settle(swarm)
        check_counts(swarm)

    swarm = play(4, scenario)
    assert len(swarm.of("copy_broken")) == 1
    assert not swarm.of("shard_resigned")
