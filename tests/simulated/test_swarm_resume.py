"""A swarm that was switched off starts again: in order or killed, from what its disks have, no step counted twice."""

from __future__ import annotations

import asyncio
import copy
import functools
import random
from typing import Any

import numpy as np
import pytest

from p2pnode.overlay.peers import Contact
from p2pnode.training.exchange.exchange import Exchange
from tests.harness.runner.long_run import more
from tests.harness.runner.stories import Fixture, played_by
from tests.harness.swarms.exact_swarm import SHARDS, SIZE
from tests.harness.swarms.exact_swarm import simulate as simulate_exact
from tests.harness.swarms.swarm import Swarm
from tests.harness.trainers.stub_trainer import delta_of, initial_vector

simulate = functools.partial(simulate_exact, step_s=0.5)


async def switch_off(swarm: Swarm, *, within_s: float = 0.0) -> dict[str, int]:
    """Every node is asked to leave at one moment, or all `within_s` in random order; returns the steps they had."""
    hosts = swarm.running()
    chance = random.Random(f"{swarm.seed}/switch off")
    for host in chance.sample(hosts, len(hosts)) if within_s else hosts:
        host.living.leave()
        await asyncio.sleep(chance.uniform(0.0, 2 * within_s / len(hosts)))
    await swarm.until(lambda: not swarm.running(), within_s=10, what="all have left")
    assert all(host.task.exception() is None for host in hosts)
    return {host.name: host.living.progress.step for host in hosts}


def whole(trained: dict[str, int]) -> np.ndarray:
    """The initial vector and the deltas of steps 1 to n of each node, each once."""
    total = initial_vector(0, SIZE).astype(np.float64)
    for name, last in trained.items():
        for step in range(1, last + 1):
            total += delta_of(name, step, SIZE)
    return total.astype(np.float32)


def applied(swarm: Swarm, shard: int) -> list[tuple[str, int, int]]:
    """(host, incarnation, step) of every delta in the acting owner's state."""
    names = {host.living.identity.node_id: host.name for host in swarm.hosts.values() if host.node is not None}
    return [
        (names[node], incarnation, step)
        for node, incarnation, ranges in swarm.owned(shard).state.applied.rows()
        for low, high in ranges
        for step in range(low, high + 1)
    ]


@pytest.mark.parametrize(
    ("seed", "method"),
    [(61, "pssp"), *more((64, "bsp"))],
)
@pytest.mark.promise(6)
def test_stopped_in_order_the_swarm_goes_on_with_the_vector_it_had(seed: int, method: str) -> None:
    """SIGTERM to all at one moment, and started again: the model is the sum of all counted steps, each once, bit by
    bit. Each node continues at its step, and later deltas are added."""

    async def scenario(swarm: Swarm) -> None:
        swarm.start_many(4)
        await swarm.until(lambda: min(swarm.steps()) >= 5 + seed % 7, within_s=60, what="steps everywhere")
        before = await switch_off(swarm)
        swarm.start_many(4, training__min_nodes=1)  # a paused node is not ready
        await swarm.settle()
        if method == "bsp":  # what was pushed before a barrier that no node has passed is pending until then
            fold(swarm, max(before.values()))

        assert {host.name: host.living.progress.step for host in swarm.running()} == before
        np.testing.assert_array_equal(swarm.model(), whole(before))

        for host in swarm.running():
            host.living.resume()
        goal = max(before.values()) + 4
        await swarm.until(lambda: min(swarm.steps()) >= goal, within_s=120, what="they go on")
        await swarm.settle()
        if method != "bsp":
            after = {host.name: host.living.progress.step for host in swarm.running()}
            missed = {
                host.name: after[host.name] - before[host.name] - len(host.trainer.trained) for host in swarm.running()
            }
            assert missed == dict.fromkeys(after, 0)
            np.testing.assert_array_equal(swarm.model(), whole(after))

    swarm = simulate(scenario, seed=seed, barrier__method=method, training__min_nodes=4, training__checkpoint_s=60.0)
    (resumed,) = swarm.of("swarm_resumed")
    assert (resumed.fields["clean"], resumed.fields["deltas_lost"]) == (True, 0)


def fold(swarm: Swarm, step: int) -> None:
    """Make visible what waits for a barrier that no node has passed, as under bsp."""
    for host in swarm.running():
        store = host.exchange.store
        for owned in store.owned.values():
            owned.state.fold(step, store.rule)


@pytest.mark.parametrize(("seed", "late_s"), [(74, 8.0), *more((71, 0.0))])
def test_killed_all_at_once_no_delta_is_counted_twice(seed: int, late_s: float) -> None:
    """SIGKILL to all soon after they met, and started again, one perhaps later. Where a shard lists all its deltas it
    is exactly their sum. What was trained since is in, but for the few steps before that of a replica that a shard went
    on with."""

    async def scenario(swarm: Swarm) -> None:
        swarm.start_many(4)
        await swarm.until(lambda: min(swarm.steps()) >= 12, within_s=60, what="steps everywhere")
        before = {host.name: host.living.progress.step for host in swarm.running()}
        for name in list(swarm.hosts):
            await swarm.kill(name)
        swarm.start_many(3)
        await asyncio.sleep(late_s)
        swarm.start("n3", bootstrap="n0")
        await swarm.until(lambda: len(swarm.running()) == 4 and min(swarm.steps()) >= 1, within_s=60, what="it resumes")
        resumed = {host.name: host.living.progress.step for host in swarm.running()}
        assert min(resumed.values()) >= 3, (before, resumed)  # that of the first checkpoint
        await swarm.until(lambda: min(swarm.steps()) >= 20, within_s=120, what="they go on")
        await swarm.settle()
        await asyncio.sleep(5.0)

        value = swarm.model()
        bounds = swarm.running()[0].exchange.store.bounds
        for shard, (start, stop) in enumerate(bounds):
            present, state = applied(swarm, shard), swarm.owned(shard).state
            since = {
                (host.name, host.living.incarnation, step)
                for host in swarm.running()
                for step in host.trainer.trained
                if step > state.era_step
            }
            assert since <= set(present)
            assert state.known_count == state.unlisted + len(present)
            if state.unlisted:
                continue
            expected = initial_vector(0, SIZE).astype(np.float64)
            for name, _, step in present:
                expected += delta_of(name, step, SIZE)
            np.testing.assert_array_equal(value[start:stop], expected.astype(np.float32)[start:stop])

    swarm = simulate(scenario, seed=seed, training__min_nodes=4, training__checkpoint_s=3.0)
    (record,) = swarm.of("swarm_resumed")
    assert record.fields["clean"] is False
    assert record.level == "warning"
    assert record.fields["nodes"] == 4


@pytest.mark.parametrize(("seed", "nodes"), [(101, 3), *more((104, 5))])
def test_started_and_stopped_without_a_step_nothing_is_forgotten(seed: int, nodes: int) -> None:
    """A node that takes a shard over and adds nothing has no better copy than others, nor has one that pulled from it.
    The next start continues from the states with their identities, not from values that look newer."""

    behind = []

    async def scenario(swarm: Swarm) -> None:
        swarm.start_many(nodes)
        await swarm.until(lambda: min(swarm.steps()) >= 8, within_s=60, what="steps everywhere")
        before = await switch_off(swarm)
        behind.append(sum(max(before.values()) - step for step in before.values()))
        for _ in range(2):
            hosts = swarm.start_many(nodes, training__min_nodes=1, training__max_steps=1, training__linger_s=60.0)
            await swarm.until(lambda: not swarm.running(), within_s=90, what="all have what was asked for, and end")
            assert all(host.task.exception() is None for host in hosts)
        swarm.start_many(nodes, training__min_nodes=1)  # a paused node is not ready
        await swarm.settle()

        np.testing.assert_array_equal(swarm.model(), whole(before))
        for shard in range(SHARDS):
            found = sorted((name, step) for name, _, step in applied(swarm, shard))
            assert found == [(name, step) for name in sorted(before) for step in range(1, before[name] + 1)], shard

    swarm = simulate(scenario, seed=seed, training__min_nodes=nodes, training__checkpoint_s=60.0)
    first, *later = [record.fields["deltas_lost"] for record in swarm.of("swarm_resumed")]
    assert first == 0
    # A node that began at the step of the others has no deltas of the steps between, and counts them as lost.
    assert max(later) <= SHARDS * behind[0]
    assert not swarm.of("deltas_lost_in_split")


def test_a_founder_that_leaves_before_it_has_resumed_forgets_nothing() -> None:
    """Started alone and stopped while it waits for the others: the next start has the whole model all the same."""

    async def scenario(swarm: Swarm) -> None:
        swarm.start_many(3)
        await swarm.until(lambda: min(swarm.steps()) >= 10, within_s=60, what="steps everywhere")
        before = await switch_off(swarm)
        swarm.start("n0")
        await asyncio.sleep(9.0)
        assert not swarm.of("swarm_resumed")
        await switch_off(swarm)
        swarm.start_many(3)
        await swarm.settle()

        np.testing.assert_array_equal(swarm.model(), whole(before))

    swarm = simulate(scenario, seed=79, training__checkpoint_s=60.0)
    assert [record.fields["clean"] for record in swarm.of("swarm_resumed")] == [True]


@played_by(simulate, seed=81, training__min_nodes=1, training__checkpoint_s=3.0)
async def test_a_late_node_with_a_higher_state_is_heard(swarm: Swarm) -> None:
    """The founder continues alone from old states, because no other node is back in time. Nodes with newer states take
    their shards back when they return, and what was trained meanwhile is added to them."""
    swarm.start_many(3)
    await swarm.until(lambda: min(swarm.steps()) >= 12, within_s=60, what="steps everywhere")
    await swarm.kill("n0")
    await swarm.until(lambda: min(swarm.steps()) >= 24, within_s=60, what="the others go on")
    before = await switch_off(swarm)
    founder = swarm.start("n0")
    await swarm.until(lambda: founder.living.progress.step >= 16, within_s=60, what="the founder goes on alone")
    for name in ("n1", "n2"):
        swarm.start(name, bootstrap="n0")
    await swarm.until(lambda: len(swarm.running()) == 3 and min(swarm.steps()) >= 30, within_s=90, what="all train")
    await swarm.settle()
    await asyncio.sleep(10.0)

    for shard in range(SHARDS):
        counted = {(name, step) for name, _, step in applied(swarm, shard)}
        assert {(name, step) for name in ("n1", "n2") for step in range(1, before[name] + 1)} <= counted
        assert {("n0", step) for step in founder.trainer.trained} <= counted


@pytest.mark.parametrize("without_counter", [True, *more(False)])
@played_by(simulate, seed=91, training__checkpoint_s=2.0)
async def test_a_state_directory_put_back_from_a_copy_uses_no_identity_twice(
    swarm: Swarm, *, without_counter: bool
) -> None:
    """An old copy of a state directory has the number of an earlier start, or none. Its node starts above those that
    the swarm has seen, also on disk, and all that it trains is in the model."""
    swarm.start_many(3)
    await swarm.until(lambda: min(swarm.steps()) >= 5, within_s=60, what="steps everywhere")
    backup = copy.deepcopy(swarm.hosts["n2"].disk)
    if without_counter:
        backup.remove("incarnation")
    for _ in range(3):
        await swarm.kill("n2")
        swarm.start("n2", bootstrap="n0")
        node = swarm.hosts["n2"].living
        came = node.progress
        await swarm.until(lambda: node.state == "training" and came.step >= 8, within_s=60, what="it trains")  # noqa: B023
        goal = came.step + 6
        await swarm.until(lambda: came.step >= goal, within_s=60, what="it goes on")  # noqa: B023
    seen = swarm.hosts["n2"].living.incarnation
    await swarm.kill("n2")
    swarm.hosts["n2"].disk = backup
    again = swarm.start("n2", bootstrap="n0")
    await swarm.until(lambda: len(again.trainer.trained) >= 6, within_s=60, what="it trains again")
    await swarm.settle()

    present = again.living.incarnation
    assert present > seen
    assert backup.read("incarnation") == str(present).encode()
    for shard in range(SHARDS):
        mine = {step for name, incarnation, step in applied(swarm, shard) if (name, incarnation) == ("n2", present)}
        assert set(again.trainer.trained) <= mine


@played_by(simulate, seed=83)
async def test_a_joiner_is_sent_no_state_before_it_has_the_vector(
    swarm: Swarm, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it loads, it uses its whole line: it is not eligible, and so no node sends it states or live deltas."""
    join = Exchange.join

    async def slowly(exchange: Exchange, source: Contact) -> Any:
        await asyncio.sleep(20.0)
        return await join(exchange, source)

    swarm.start_many(3)
    await swarm.until(lambda: min(swarm.steps()) >= 5, within_s=60, what="steps everywhere")
    monkeypatch.setattr(Exchange, "join", slowly)
    joiner = swarm.start("n3", bootstrap="n0")
    await swarm.until(lambda: joiner.exchange is not None, within_s=10, what="its exchange stands")
    began = swarm.clock.monotonic()
    while swarm.clock.monotonic() - began < 19.0:
        await asyncio.sleep(0.25)
        store = joiner.exchange.store
        assert not store.owned
        assert not store.backed
        assert not joiner.living.overlay.heartbeat.eligible
    await swarm.until(lambda: bool(joiner.exchange.store.owned), within_s=60, what="it owns some then")


@pytest.mark.parametrize("seed", [104, *more(108)])
@played_by(
    simulate,
    seed=Fixture("seed"),
    exchange__shards=12,
    training__min_nodes=6,
    training__checkpoint_s=60.0,
    barrier__method="asp",
)
async def test_after_a_healed_split_the_disks_hold_what_the_owners_had(swarm: Swarm) -> None:
    """A split into three and three is healed, then all leave at one moment. Started again, the model is bit by bit the
    owners', though some nodes still have the copy of a pair that lost."""
    hosts = [host.address for host in swarm.start_many(6)]
    await swarm.until(lambda: min(swarm.steps()) >= 10, within_s=120, what="ten steps everywhere")
    swarm.network.partition(hosts[:3], hosts[3:])
    await asyncio.sleep(12.0)
    swarm.network.heal()

    def mended() -> bool:
        stores = [host.exchange.store for host in swarm.running()]
        owned = sum(len(store.owned) for store in stores)
        return owned == 12 and not any(store.superseded for store in stores)

    await swarm.until(mended, within_s=60, what="one model again")
    reached = max(swarm.steps()) + 4
    await swarm.until(lambda: max(swarm.steps()) >= reached, within_s=60, what="they go on")
    await swarm.settle()
    value = swarm.model()
    await switch_off(swarm, within_s=0.1)
    swarm.start_many(6, training__min_nodes=1)
    await swarm.settle()

    np.testing.assert_array_equal(swarm.model(), value)


@pytest.mark.parametrize("through", ["the master", "itself"])
def test_a_founder_goes_on_alone_where_no_node_has_the_model(through: str) -> None:
    """All workers are killed at once; a master stays. The founder enters the swarm through it, finds that no node there
    has the model, and opens the run again from what the disks have. The others train with it."""

    async def scenario(swarm: Swarm) -> None:
        swarm.start_many(3)
        swarm.start("m", bootstrap="n0", node__role="master", dispatch__source="master")
        await swarm.until(lambda: min(steps_of_workers(swarm)) >= 12, within_s=60, what="steps everywhere")
        for name in ("n0", "n1", "n2"):
            await swarm.kill(name)
        swarm.start("n0", bootstrap="m" if through == "the master" else None)
        for name in ("n1", "n2"):
            swarm.start(name, bootstrap="m")
        await swarm.until(
            lambda: all(host.living.phase == "training" for host in swarm.running() if host.name != "m"),
            within_s=45,
            what="all train again",
        )
        before = steps_of_workers(swarm)
        await swarm.until(
            lambda: min(steps_of_workers(swarm)) >= max(before) + 3, within_s=60, what="they go on together"
        )

    swarm = simulate(scenario, seed=5, training__checkpoint_s=2.0)
    assert len(swarm.of("swarm_resumed")) == 1


def steps_of_workers(swarm: Swarm) -> list[int]:
    return [host.living.progress.step for host in swarm.running() if host.name != "m"]
