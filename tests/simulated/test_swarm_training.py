"""Whole nodes on the simulated network: training together, joining, leaving, dying, coming back."""

from __future__ import annotations

import asyncio
from contextvars import copy_context

import numpy as np
import pytest

from p2pnode.errors import ExitCode, UserError
from p2pnode.lifecycle.memory_budget import budget
from p2pnode.training.shards.applied import DeltaId
from tests.harness.environment.virtual_loop import OWNER, VirtualLoop
from tests.harness.histories.exchange_progress import Standing
from tests.harness.runner.long_run import more
from tests.harness.runner.stories import Fixture, played_by
from tests.harness.swarms.exact_swarm import SHARDS, SIZE, acknowledged, simulate
from tests.harness.swarms.swarm import Host, Swarm
from tests.harness.trainers.stub_trainer import StubTrainer, delta_of, initial_vector


def abandoned(leaver: Host) -> np.ndarray:
    """Minus the delta of a step that a leaver had trained but not announced: not all of it was acknowledged."""
    trainer = leaver.trainer
    unannounced = [step for step in trainer.trained if step > leaver.living.progress.step]
    return -trainer.expected(unannounced)


@pytest.mark.parametrize("method", ["pssp", *more("asp", "bsp", "ssp", "pbsp")])
@pytest.mark.promise(1)
@played_by(simulate, seed=11, barrier__method=Fixture("method"), training__min_nodes=5)
async def test_every_delta_is_in_the_model_once(swarm: Swarm) -> None:
    """Under every barrier the model equals the initial vector plus all deltas, each once."""
    swarm.start_many(5)
    await swarm.until(lambda: min(swarm.steps()) >= 12, within_s=300, what="12 steps everywhere")
    await swarm.settle()

    np.testing.assert_array_equal(swarm.model(), acknowledged(swarm))


@played_by(simulate, seed=12, exchange__shards=32)
async def test_the_shards_spread_over_the_nodes(swarm: Swarm) -> None:
    """Shortly after a swarm has gathered, no node owns more than half of the shards and each has a backup."""
    swarm.start_many(4)
    await swarm.until(lambda: min(swarm.steps()) >= 3, within_s=60, what="3 steps everywhere")

    owned = [len(host.exchange.store.owned) for host in swarm.running()]
    backups = [one.backup for host in swarm.running() for one in host.exchange.store.owned.values()]
    assert sum(owned) == 32
    assert max(owned) <= 16
    assert all(backup is not None for backup in backups)


@played_by(simulate, seed=13, barrier__method="bsp", training__min_nodes=5)
async def test_bsp_keeps_everybody_on_one_step(swarm: Swarm) -> None:
    """Under bsp no node is ever more than one completed step ahead of another."""
    swarm.start_many(5)
    await swarm.until(lambda: min(swarm.steps()) >= 1, within_s=60, what="the first step")
    gaps = []

    def look() -> bool:
        gaps.append(max(swarm.steps()) - min(swarm.steps()))
        return min(swarm.steps()) >= 15

    await swarm.until(look, within_s=300, what="15 steps")

    assert max(gaps) <= 1


@pytest.mark.parametrize(("method", "most"), [("pssp", 5), *more(("pbsp", 1), ("ssp", 5))])
@played_by(simulate, seed=19, step_s=0.005, barrier__method=Fixture("method"), barrier__sample=2, training__min_nodes=3)
async def test_nodes_that_begin_together_begin_together(swarm: Swarm, *, most: int) -> None:
    """Steps of 5 ms on one machine's network, and the last node comes after half a minute. A node that sees it a fifth
    of a second before another does not run ahead, so no node misses a step."""
    swarm.network.delay = (0.0001, 0.0003)
    swarm.start_many(2)
    await asyncio.sleep(30.0)
    swarm.start("n2", bootstrap="n0")
    gaps = []

    def look() -> bool:
        gaps.append(max(swarm.steps()) - min(swarm.steps()))
        return min(swarm.steps()) >= 40

    await swarm.until(look, within_s=60, what="40 steps", every_s=0.001)

    assert max(gaps) <= most
    assert all(host.trainer.trained == list(range(1, len(host.trainer.trained) + 1)) for host in swarm.running())


@pytest.mark.promise(3)
@played_by(simulate, seed=14, training__min_nodes=5)
async def test_a_killed_owner_loses_nothing_that_was_acknowledged(swarm: Swarm) -> None:
    """Killing a node mid-run: the others continue within the detection bound, and the model has every delta once."""
    swarm.start_many(5)
    await swarm.until(lambda: min(swarm.steps()) >= 5, within_s=60, what="5 steps everywhere")
    victim = max(swarm.running(), key=lambda host: len(host.exchange.store.owned))
    before = victim.trainer.trained[-1]
    unpushed = victim.living.progress.step < before
    await swarm.kill(victim.name)
    standing = Standing(swarm)

    def look() -> bool:
        standing.look()
        return min(swarm.steps()) >= 30

    await swarm.until(look, within_s=200, what="the survivors go on")
    await swarm.settle()

    assert standing.longest_s <= 10.0 + 4.0  # the detection bound and a slow step of the stub
    ours = swarm.model() - acknowledged(swarm, without=(victim.name,))
    theirs = victim.trainer.expected()
    if unpushed:
        # Its last step was in transit when it crashed: each of its shards is in or out, whole.
        last_delta = theirs - victim.trainer.expected(victim.trainer.trained[:-1])
        assert np.all((ours == theirs) | (ours == theirs - last_delta))
    else:
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.promise(4)
@played_by(simulate, seed=15)
async def test_a_leave_is_known_at_once_and_moves_everything(swarm: Swarm) -> None:
    """A node that leaves has handed over its shards when it is gone, and its neighbours know within a second."""
    swarm.start_many(4)
    await swarm.until(lambda: min(swarm.steps()) >= 4, within_s=60, what="4 steps everywhere")
    leaver = max(swarm.running(), key=lambda host: len(host.exchange.store.owned))
    node_id = leaver.living.overlay.node_id
    node = leaver.living
    node.leave()
    await swarm.until(lambda: leaver.task.done(), within_s=5, what="the leaver has gone")
    await swarm.until(
        lambda: not any(host.living.overlay.is_alive(node_id) for host in swarm.running()),
        within_s=1,
        what="all know that it left",
    )

    assert leaver.task.result() == "leave"
    assert not node.exchange.store.owned
    assert not swarm.of("shards_taken_over")
    await swarm.until(lambda: min(swarm.steps()) >= 15, within_s=200, what="the others go on")
    await swarm.settle()

    # The current step at its leave is in or out, each of its shards whole.
    with_it, value = acknowledged(swarm), swarm.model()
    assert np.all((value == with_it) | (value == with_it + abandoned(leaver)))


@pytest.mark.promise(2)
@played_by(simulate, seed=16)
async def test_a_late_joiner_starts_where_the_others_are(swarm: Swarm) -> None:
    """A node that joins a running swarm has the vector and starts at the median step, within five seconds."""
    swarm.start_many(3)
    await swarm.until(lambda: min(swarm.steps()) >= 20, within_s=120, what="20 steps everywhere")
    joiner = swarm.start("late", bootstrap="n2")
    await swarm.until(lambda: joiner.living.state in ("training", "waiting"), within_s=5, what="it trains")

    assert joiner.living.progress.step >= 15


@played_by(simulate, seed=17)
async def test_a_killed_node_comes_back_under_a_new_incarnation(swarm: Swarm) -> None:
    """Restarted on its state directory, a killed node keeps its id, raises its incarnation, and catches up."""
    swarm.start_many(3)
    await swarm.until(lambda: min(swarm.steps()) >= 6, within_s=60, what="6 steps everywhere")
    before = swarm.hosts["n1"].living
    node_id, incarnation = before.overlay.node_id, before.incarnation
    await swarm.kill("n1")
    await swarm.until(lambda: min(swarm.steps()) >= 15, within_s=120, what="the others go on")
    again = swarm.start("n1", bootstrap="n0")
    await swarm.until(lambda: again.living.state in ("training", "waiting"), within_s=15, what="it trains again")

    assert again.living.overlay.node_id == node_id
    assert again.living.incarnation > incarnation
    assert again.living.progress.step >= 10


@played_by(simulate, seed=18, barrier__method="bsp", training__min_nodes=4)
async def test_a_hung_trainer_is_announced_and_blocks_no_other(swarm: Swarm) -> None:
    """A node whose trainer hangs leaves samples and counts, the others continue, and it returns when it progresses."""
    swarm.start_many(4)
    await swarm.until(lambda: min(swarm.steps()) >= 4, within_s=60, what="4 steps everywhere")
    hung = swarm.hosts["n2"]
    hung.trainer.hang()
    await swarm.until(lambda: hung.living.state == "stalled", within_s=40, what="it says so")
    others = [host for host in swarm.running() if host is not hung]
    at = min(host.living.progress.step for host in others)
    await swarm.until(
        lambda: min(host.living.progress.step for host in others) >= at + 10, within_s=60, what="the others go on"
    )

    assert all(host.living.overlay.workers() == 3 for host in others)
    hung.trainer.resume()
    await swarm.until(lambda: hung.living.state in ("training", "waiting"), within_s=20, what="it moves again")


@pytest.mark.promise(12)
@played_by(simulate, seed=19, training__min_nodes=3)
async def test_a_crashing_trainer_is_restarted(swarm: Swarm) -> None:
    """A trainer that crashes is started again from the last base, and no step is lost or doubled."""
    swarm.start_many(3)
    await swarm.until(lambda: min(swarm.steps()) >= 3, within_s=60, what="3 steps everywhere")
    swarm.hosts["n1"].trainer.crash_next(2)
    await swarm.until(lambda: min(swarm.steps()) >= 12, within_s=200, what="12 steps everywhere")
    await swarm.settle()

    assert swarm.hosts["n1"].trainer.starts == 3
    np.testing.assert_array_equal(swarm.model(), acknowledged(swarm))


@played_by(simulate, seed=20, barrier__method="bsp", training__min_nodes=3)
async def test_a_paused_node_blocks_no_other_and_catches_up(swarm: Swarm) -> None:
    """A paused node leaves samples, keeps its shards, and resumes at the step of the others."""
    swarm.start_many(3)
    await swarm.until(lambda: min(swarm.steps()) >= 3, within_s=60, what="3 steps everywhere")
    paused = swarm.hosts["n2"].living
    paused.pause()
    others = [swarm.hosts["n0"], swarm.hosts["n1"]]
    at = min(host.living.progress.step for host in others)
    await swarm.until(
        lambda: min(host.living.progress.step for host in others) >= at + 12, within_s=90, what="the others go on"
    )
    assert paused.state == "paused"
    paused.resume()
    await swarm.until(lambda: paused.progress.step >= at + 11, within_s=20, what="it caught up")


@pytest.mark.promise(3)
@played_by(simulate, seed=23)
async def test_a_frozen_node_blocks_no_other_and_rejoins(swarm: Swarm) -> None:
    """A node whose machine stops for eight seconds: the others continue, and when it resumes all continue."""
    swarm.start_many(2)
    await swarm.until(lambda: min(swarm.steps()) >= 5, within_s=60, what="5 steps everywhere")
    frozen = swarm.hosts["n1"].living.overlay.address
    swarm.network.pause(frozen)
    await asyncio.sleep(8.0)
    swarm.network.resume(frozen)
    standing = Standing(swarm)

    def look() -> bool:
        standing.look()
        return min(swarm.steps()) >= 40

    await swarm.until(look, within_s=120, what="all go on")

    assert standing.longest_s <= 10.0 + 4.0  # the detection bound and a slow step of the stub


def sum_of_the_applied(swarm: Swarm) -> tuple[np.ndarray, int]:
    """What the owners' sets of applied deltas add up to, and how many shards of what was trained are not in them."""
    total = initial_vector(0, SIZE).astype(np.float64)
    missing = 0
    stores = [host.exchange.store for host in swarm.running()]
    for shard, (start, stop) in enumerate(stores[0].bounds):
        (owned,) = [store.owned[shard] for store in stores if shard in store.owned]
        for host in swarm.running():
            node_id, incarnation = host.living.overlay.node_id, host.living.incarnation
            for step in host.trainer.trained:
                there = owned.state.knows(DeltaId(node_id, incarnation, step))
                missing += not there
                total[start:stop] += there * delta_of(host.name, step, SIZE)[start:stop]
    return total.astype(np.float32), missing


@pytest.mark.parametrize("method", ["bsp", *more("asp")])
@played_by(simulate, seed=24, barrier__method=Fixture("method"), training__min_nodes=6)
async def test_a_split_for_half_a_minute_ends_in_one_model(swarm: Swarm, *, method: str) -> None:
    """Three of six nodes split from the others: both sides continue, and what both acknowledged is in the model
    once."""
    swarm.start_many(6)
    await swarm.until(lambda: min(swarm.steps()) >= 10, within_s=120, what="10 steps everywhere")
    hosts = [host.address for host in swarm.running()]
    swarm.network.partition(hosts[:3], hosts[3:])
    await asyncio.sleep(30.0)
    during = swarm.steps()
    swarm.network.heal()
    began = swarm.clock.monotonic()

    def mended() -> bool:
        stores = [host.exchange.store for host in swarm.running()]
        return sum(len(store.owned) for store in stores) == SHARDS and not any(store.superseded for store in stores)

    await asyncio.sleep(2.0)
    await swarm.until(mended, within_s=30, what="one owner for each shard")
    print(f"mended {swarm.clock.monotonic() - began:.1f} s after the split, steps {during}")
    at = min(swarm.steps())
    await swarm.until(lambda: min(swarm.steps()) >= at + 5, within_s=120, what="all go on")
    await swarm.settle()

    assert min(during) >= 15  # both sides continued
    assert swarm.of("deltas_repaired")
    assert not swarm.of("deltas_lost_in_split")
    # A side that began a new era from a replica refuses deltas with an older base; nothing else is missing. One
    # whose answer the split cut off is refused there and in the model all the same: the other side had added it.
    value, missing = sum_of_the_applied(swarm)
    np.testing.assert_array_equal(swarm.model(), value)
    refused = sum(host.exchange.counters.refused for host in swarm.running())
    assert refused - SHARDS <= missing <= refused  # at most the shards of one delta
    if method == "bsp":
        np.testing.assert_array_equal(swarm.model(), acknowledged(swarm))


@pytest.mark.parametrize(("method", "seed"), [("pssp", 1), *more(("bsp", 2))])
def test_a_node_that_slept_goes_on_where_the_others_are(method: str, seed: int) -> None:
    """Its process stopped for eight seconds, dozens of steps of the other. It is not waited for as long again, but
    continues at the other's step. All that was not refused as late is in the model."""
    stands: list[float] = []

    async def scenario(swarm: Swarm) -> None:
        swarm.start("n0")
        sleeper = copy_context()
        sleeper.run(OWNER.set, "n1")
        host = sleeper.run(lambda: swarm.start("n1", bootstrap="n0"))
        await swarm.until(lambda: len(swarm.steps()) == 2 and min(swarm.steps()) >= 10, within_s=60, what="both train")
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        swarm.network.pause(host.living.overlay.address)
        loop.stall("n1", 8.0)
        await asyncio.sleep(8.0)
        swarm.network.resume(host.living.overlay.address)
        before = host.living.progress.step
        moved = {one.name: (one.living.progress.step, swarm.clock.monotonic()) for one in swarm.running()}
        woken = swarm.clock.monotonic()
        while swarm.clock.monotonic() < woken + 10.0:
            await asyncio.sleep(0.05)
            for one in swarm.running():
                step, since = moved[one.name]
                stands.append(swarm.clock.monotonic() - since)
                if one.living.progress.step != step:
                    moved[one.name] = one.living.progress.step, swarm.clock.monotonic()
        assert host.living.progress.step > before + 20
        await swarm.settle()
        value, missing = sum_of_the_applied(swarm)
        np.testing.assert_array_equal(swarm.model(), value)
        # A backup may have what its owner has refused since: it was forwarded before the sleep.
        assert missing <= sum(one.exchange.counters.refused for one in swarm.running())

    swarm = simulate(scenario, seed=seed, step_s=0.1, barrier__method=method, training__min_nodes=1)
    assert max(stands) < 2.0
    jumps = [(record.node, record.fields["was"], record.fields["step"]) for record in swarm.of("caught_up")]
    print(jumps)
    # Once more where what it had heard of the other on its first look was old.
    assert jumps[0][0] == jumps[-1][0] == "n1"
    assert len(jumps) <= 2
    assert jumps[-1][2] > jumps[0][1] + 30


def test_a_node_that_slept_for_some_steps_does_not_train_them_alone() -> None:
    """It wakes more than 8 and at most 16 steps behind, so its delta is not late. It goes on at the step of the others
    after its first one: they do not wait, and it does not train alone what they have trained together."""
    behind: list[int] = []

    async def scenario(swarm: Swarm) -> None:
        swarm.start("n0")
        sleeper = copy_context()
        sleeper.run(OWNER.set, "n1")
        host = sleeper.run(lambda: swarm.start("n1", bootstrap="n0"))
        swarm.start("n2", bootstrap="n0")
        await swarm.until(lambda: len(swarm.steps()) == 3 and min(swarm.steps()) >= 5, within_s=60, what="all train")
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        swarm.network.pause(host.living.overlay.address)
        loop.stall("n1", 20.0)
        await asyncio.sleep(20.0)
        swarm.network.resume(host.living.overlay.address)
        before, others = host.living.progress.step, [swarm.hosts[name].living.progress for name in ("n0", "n2")]
        behind.append(min(progress.step for progress in others) - before)
        trained = len(host.trainer.trained)
        await swarm.until(lambda: min(swarm.steps()) > before + behind[0], within_s=30, what="it is where they are")
        assert len(host.trainer.trained) - trained <= 4
        await swarm.settle()
        value, _ = sum_of_the_applied(swarm)
        np.testing.assert_array_equal(swarm.model(), value)

    swarm = simulate(scenario, seed=4, barrier__method="pssp", training__min_nodes=3)
    print(behind)
    assert 8 < behind[0] <= 16
    assert {record.node for record in swarm.of("caught_up")} == {"n1"}


def test_a_node_that_slept_while_another_died_goes_on_where_the_living_one_is() -> None:
    """When it wakes the dead one seems to be at the step before its sleep, and so does the living one, which waits for
    it four steps ahead of what it would make up. It asks, and trains nothing alone."""
    behind: list[int] = []

    async def scenario(swarm: Swarm) -> None:
        swarm.start("n0")
        sleeper = copy_context()
        sleeper.run(OWNER.set, "n1")
        host = sleeper.run(lambda: swarm.start("n1", bootstrap="n0"))
        swarm.start("n2", bootstrap="n0")
        await swarm.until(lambda: len(swarm.steps()) == 3 and min(swarm.steps()) >= 5, within_s=60, what="all train")
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        swarm.network.pause(host.living.overlay.address)
        loop.stall("n1", 11.0)
        await asyncio.sleep(10.0)
        await swarm.kill("n2")
        await asyncio.sleep(1.0)
        swarm.network.resume(host.living.overlay.address)
        before, other = host.living.progress.step, swarm.hosts["n0"].living.progress
        behind.append(other.step - before)
        trained = len(host.trainer.trained)
        await swarm.until(lambda: host.living.progress.step >= before + behind[0], within_s=30, what="it is there")
        assert len(host.trainer.trained) - trained <= 2
        await swarm.settle()

    swarm = simulate(scenario, seed=4, barrier__method="pssp", training__min_nodes=3)
    print(behind)
    assert 4 < behind[0] <= 8
    assert {record.node for record in swarm.of("caught_up")} == {"n1"}


@played_by(simulate, seed=21)
async def test_another_model_is_refused_with_both_values(swarm: Swarm) -> None:
    """A joiner whose layout differs is refused, and the message names both sides' values."""
    swarm.start_many(2)
    await swarm.until(lambda: min(swarm.steps()) >= 1, within_s=60, what="a step")
    swarm._make_trainer = lambda name: StubTrainer(name, SIZE + 1, start_s=0.3)
    odd = swarm.start("odd", bootstrap="n0")
    await swarm.until(lambda: odd.task.done(), within_s=20, what="it ends")

    error = odd.task.exception()
    assert error is not None
    assert "[257]" in str(error)
    assert "[256]" in str(error)


@played_by(simulate, seed=27)
async def test_memory_is_checked_before_it_is_taken(swarm: Swarm) -> None:
    """A founder whose share cannot fit is refused; a joiner whose share fits, but not a larger one, is warned."""
    swarm.start_many(3)
    await swarm.until(lambda: min(swarm.steps()) >= 1, within_s=60, what="a step")
    config = swarm.running()[0].living.config
    checkpoints = config.training.checkpoint_s > 0
    share, half = (budget(SIZE, config.exchange, nodes, checkpoints=checkpoints).to_come for nodes in (4, 2))
    assert share < half
    swarm.available_memory = share
    joiner = swarm.start("joiner", bootstrap="n0")
    await swarm.until(lambda: joiner.living.progress.step >= 1, within_s=60, what="the joiner trains")
    assert any(record.event == "memory_tight" and record.node == "joiner" for record in swarm.records)
    assert joiner.living.budget().owned == SIZE

    swarm.available_memory = budget(SIZE, config.exchange, 1, checkpoints=checkpoints).to_come - 1
    alone = swarm.start("alone")
    await swarm.until(lambda: alone.task.done(), within_s=20, what="it ends")
    error = alone.task.exception()
    assert isinstance(error, UserError)
    assert error.exit_code == ExitCode.TRAINER
    assert "0.0 MB more memory" in error.message


@played_by(simulate, seed=22, training__checkpoint_s=5.0)
async def test_the_whole_swarm_comes_back_after_being_switched_off(swarm: Swarm) -> None:
    """All nodes killed and started again on their disks: the swarm continues from a checkpoint, not from zero."""
    swarm.start_many(3)
    await swarm.until(lambda: min(swarm.steps()) >= 20, within_s=120, what="20 steps everywhere")
    for name in list(swarm.hosts):
        await swarm.kill(name)
    swarm.start_many(3)
    await swarm.until(
        lambda: all(host.living.state in ("training", "waiting") for host in swarm.running()),
        within_s=60,
        what="all train again",
    )
    await swarm.until(lambda: min(swarm.steps()) >= 25, within_s=60, what="they go on")

    assert len({host.living.overlay.genesis for host in swarm.running()}) == 1
