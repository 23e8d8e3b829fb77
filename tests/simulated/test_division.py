"""The shards of a swarm are divided while it trains: every step is in the model once, whoever divides when."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.histories.conservation import play
from tests.harness.runner.long_run import more
from tests.harness.swarms.swarm import Host, Swarm
from tests.harness.trainers.stub_trainer import StubTrainer, exponential, initial_vector
from tests.simulated.test_swarm_resume import SHARDS, applied, fold, simulate, switch_off, whole
from tests.simulated.test_swarm_training import EXACT, SIZE, settle, steps
from training.encoding.codecs import Vector
from training.shard_count import Partition

#: Values of a shard that can be divided by four.
LARGE = 4 * 4096


def shards_of(swarm: Swarm) -> list[int]:
    """How many shards each node has; 0 before it has any."""
    nodes = [host.living for host in swarm.running()]
    return [0 if node.manifest is None or node.exchange is None else len(node.exchange.store) for node in nodes]


async def divide(swarm: Swarm, host: Host, shards: int) -> None:
    """One node divides its shards; wait until all have followed."""
    assert host.living.exchange.divide(Partition(shards, shards // SHARDS))
    await swarm.until(lambda: {*shards_of(swarm)} == {shards}, within_s=10, what=f"all have {shards} shards")


@pytest.mark.parametrize(("method", "seed"), [("pssp", 61), *more(("bsp", 62), ("asp", 63), ("bsp", 64))])
def test_a_training_swarm_divides_its_shards(method: str, seed: int) -> None:
    """Twice, each time by another node, while all train. The model is the sum of all counted steps, each once, bit by
    bit; and so it is after all have stopped and started again, with the new shards. No take-over comes of it, and every
    node tells of each division once."""

    async def scenario(swarm: Swarm) -> None:
        hosts = swarm.start_many(4)
        await swarm.until(lambda: min(steps(swarm)) >= 4, within_s=60, what="steps everywhere")
        await divide(swarm, hosts[2], 2 * SHARDS)
        goal = min(steps(swarm)) + 3
        await swarm.until(lambda: min(steps(swarm)) >= goal, within_s=30, what="they go on")
        await divide(swarm, hosts[1], 4 * SHARDS)
        goal = min(steps(swarm)) + 3
        await swarm.until(lambda: min(steps(swarm)) >= goal, within_s=30, what="they go on again")
        assert swarm.of("shards_taken_over") == []
        before = await switch_off(swarm)

        swarm.start_many(4, training__min_nodes=1)
        await settle(swarm)
        assert {host.living.manifest.partition for host in swarm.running()} == {Partition(4 * SHARDS, 4)}
        fold(swarm, max(before.values()))
        np.testing.assert_array_equal(swarm.value(), whole(before))
        for shard in range(4 * SHARDS):
            found = applied(swarm, shard)
            assert sorted({(name, step) for name, _, step in found}) == sorted((name, step) for name, _, step in found)

    swarm = simulate(scenario, seed=seed, barrier__method=method, training__min_nodes=4, training__checkpoint_s=60.0)
    told = [(one.node, one.fields["stored"], one.fields["shards"]) for one in swarm.of("shards_divided")]
    assert sorted(told) == sorted((f"n{node}", was, 2 * was) for node in range(4) for was in (SHARDS, 2 * SHARDS))
    (resumed,) = swarm.of("swarm_resumed")
    assert (resumed.fields["clean"], resumed.fields["deltas_lost"]) == (True, 0)


def test_a_division_changes_no_bit_of_a_synchronous_run() -> None:
    """Under bsp with momentum: the same steps with and without a division lead to the same values."""

    def final(shards: int) -> Vector:
        found: list[Vector] = []

        async def scenario(swarm: Swarm) -> None:
            hosts = swarm.start_many(3, training__max_steps=12)
            await swarm.until(lambda: min(steps(swarm)) >= 4, within_s=60, what="steps everywhere")
            if shards > SHARDS:
                await divide(swarm, hosts[0], shards)
                assert max(steps(swarm)) < 12
            await swarm.until(lambda: not swarm.running(), within_s=120, what="the run has ended")
            found.append(hosts[0].trainer.vector.copy())
            for host in hosts:
                np.testing.assert_array_equal(host.trainer.vector, found[0])

        simulate(
            scenario, seed=65, barrier__method="bsp", training__min_nodes=3, exchange__outer_momentum=0.5,
            exchange__outer_lr=0.7,
        )  # fmt: skip
        return found[0]

    once, divided = final(SHARDS), final(4 * SHARDS)
    assert not np.array_equal(once, initial_vector(0, SIZE))
    np.testing.assert_array_equal(divided, once)


def test_joiners_take_over_the_present_shards() -> None:
    """One that names no number, one that names the number with which the run began, and the founder, which comes back
    with that number in its settings. All train with the others."""

    async def scenario(swarm: Swarm) -> None:
        hosts = swarm.start_many(3)
        await swarm.until(lambda: min(steps(swarm)) >= 3, within_s=60, what="steps everywhere")
        await divide(swarm, hosts[1], 2 * SHARDS)
        hosts[0].living.leave()
        await swarm.until(lambda: len(swarm.running()) == 2, within_s=30, what="the founder has left")
        await divide(swarm, hosts[1], 4 * SHARDS)

        late = [
            swarm.start("n3", bootstrap="n1", exchange__shards=0),
            swarm.start("n4", bootstrap="n1", exchange__shards=SHARDS),
            swarm.start("n0", exchange__shards=SHARDS),
        ]
        await swarm.until(lambda: all(len(one.trainer.trained) >= 3 for one in late), within_s=60, what="they train")
        assert shards_of(swarm) == [4 * SHARDS] * 5

    simulate(scenario, seed=66, barrier__method="pssp", training__checkpoint_s=5.0)


def test_a_swarm_that_outgrows_its_shards_divides_them() -> None:
    """Nodes join until there are fewer than two shards for each; half a minute later every shard is in parts, as small
    as they may be. The founder, whose number is given, follows the others."""

    async def scenario(swarm: Swarm) -> None:
        swarm.start("n0", exchange__shards=2)
        for number in range(1, 3):
            swarm.start(f"n{number}", bootstrap="n0", exchange__shards=0)
        await swarm.until(lambda: shards_of(swarm) == [2] * 3, within_s=30, what="three nodes with two shards")
        await swarm.until(lambda: shards_of(swarm) == [8] * 3, within_s=60, what="divided")
        at = min(steps(swarm))
        await swarm.until(lambda: min(steps(swarm)) >= at + 3, within_s=30, what="they go on")
        assert {host.living.manifest.partition for host in swarm.running()} == {Partition(8, 4)}
        assert {host.living.shards_by for host in swarm.running()} == {"division"}

    world(scenario, 2 * LARGE)


def world(scenario: Callable[[Swarm], Awaitable[None]], values: int, **settings: Any) -> None:
    """Run a scenario with a model of so many values."""

    async def main() -> None:
        swarm = Swarm(
            seed=67,
            settings={**EXACT, **settings},
            make_trainer=lambda name: StubTrainer(name, values, step_s=exponential(0.5), start_s=0.3),
        )
        try:
            await scenario(swarm)
        finally:
            await swarm.stop()

    VirtualLoop().run(main(), limit_s=3600)


@pytest.mark.parametrize(("first", "histories"), [(5001, 1), *more((5000, 45), (5045, 41))])
def test_divisions_amid_faults_lose_and_double_nothing(first: int, histories: int) -> None:
    """As `test_conservation`, while nodes divide their shards at any moment, each for itself: after any faults each
    part is the sum of its deltas, with all acknowledged ones among them, and every node has the same shards."""
    tallies = [play(seed, 8, divides=True) for seed in range(first, first + histories)]

    print(
        f"seeds {first} to {first + histories - 1}: "
        "python -m tests.harness.histories.conservation --nodes 8 --divides --seed N"
    )
    assert sum(tally.divided for tally in tallies) >= 8 * histories
    assert sum(tally.taken_over for tally in tallies) >= 4 * histories
    assert sum(tally.acknowledged for tally in tallies) >= 200 * histories
    assert all(tally.longest_of_one_s <= tally.limit_s <= 25.0 for tally in tallies)


@pytest.mark.parametrize("seed", [5400, *more(5401)])
def test_clipped_deltas_are_divided_too(seed: int) -> None:
    """What was clipped with its whole is in every part as it was in that."""
    tally = play(seed, 8, "clip", divides=True)

    assert tally.divided >= 7
    assert tally.clipped >= 20


def test_one_member_that_divides_beyond_reason_is_not_followed() -> None:
    """The others take over what it had, and train on with their shards; a second one that divides so is followed."""

    async def scenario(swarm: Swarm) -> None:
        hosts = swarm.start_many(5)
        await swarm.until(lambda: min(steps(swarm)) >= 4, within_s=60, what="steps everywhere")
        assert hosts[4].living.exchange.divide(Partition(128, 128 // SHARDS))
        await swarm.until(lambda: 128 in shards_of(swarm), within_s=10, what="one has divided")
        await asyncio.sleep(20.0)
        goal = min(steps(swarm)[:4]) + 5
        await swarm.until(lambda: min(steps(swarm)[:4]) >= goal, within_s=20, what="the others go on")
        assert shards_of(swarm) == [SHARDS] * 4 + [128]
        rows = [list(host.living.progress.steps)[-3:-1] for host in hosts[:4]]
        assert all(row["acknowledged"] == SHARDS for found in rows for row in found), rows

        assert hosts[0].living.exchange.divide(Partition(128, 128 // SHARDS))
        await swarm.until(lambda: shards_of(swarm) == [128] * 5, within_s=30, what="all have divided")

    simulate(scenario, seed=69, barrier__method="asp")


def test_a_node_that_was_cut_off_follows() -> None:
    """One of four is cut off while the others divide; it trains on alone. When it meets them again it divides its own
    shards, the two sides are reconciled as after every split, and it trains with the others."""

    async def scenario(swarm: Swarm) -> None:
        hosts = swarm.start_many(4)
        await swarm.until(lambda: min(steps(swarm)) >= 4, within_s=60, what="steps everywhere")
        alone = hosts[3]
        swarm.network.partition([host.address for host in hosts[:3]], [alone.address])
        await asyncio.sleep(8.0)
        assert hosts[0].living.exchange.divide(Partition(2 * SHARDS, 2))
        await asyncio.sleep(8.0)
        assert shards_of(swarm) == [2 * SHARDS] * 3 + [SHARDS]
        swarm.network.heal()
        await swarm.until(lambda: shards_of(swarm) == [2 * SHARDS] * 4, within_s=60, what="it has divided")
        await settle(swarm)
        stores = [host.living.exchange.store for host in hosts]
        await swarm.until(lambda: not any(store.superseded for store in stores), within_s=60, what="all is reconciled")
        assert swarm.of("deltas_lost_in_split") == []
        reached = {host.name: host.living.progress.step for host in hosts}
        for shard in range(2 * SHARDS):
            found = [(name, step) for name, _, step in applied(swarm, shard)]
            assert len({*found}) == len(found)
            own = [step for name, step in found if name == alone.name]
            assert max(own) == reached[alone.name]

    simulate(scenario, seed=68, barrier__method="asp", exchange__log_seconds=120.0)
