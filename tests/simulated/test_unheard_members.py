"""Nodes that cannot dial each other: what a node counts, waits for and weighs is what the swarm does.

Behind routers that give each destination another port, and on both sides of a hole, two nodes never hear each other.
Both hear a third.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from p2pnode.training.step_rules import node_index
from tests.harness.environment.virtual_loop import run
from tests.harness.network.nat import Nat
from tests.harness.runner.long_run import more
from tests.harness.runner.stories import run_by
from tests.harness.swarms.swarm import Swarm
from tests.harness.trainers.stub_trainer import StepTime, StubTrainer

NODES, SHARDS = 6, 8
#: Detection, with lost datagrams and what depends on another node.
BOUND_S = 10.0


def swarm_of(seed: int, step_s: Callable[[str], StepTime] = lambda _: 0.5, **settings: Any) -> Swarm:
    print(f"seed {seed}")
    chosen = {"exchange.shards": SHARDS} | {key.replace("__", "."): value for key, value in settings.items()}
    return Swarm(seed=seed, settings=chosen, make_trainer=lambda name: StubTrainer(name, step_s=step_s(name)))


def address(number: int) -> str:
    """As `Swarm.start` will name the host n{number}."""
    return f"10.0.0.{number + 2}"


def router(number: int) -> str:
    return f"203.0.113.{number}"


def hide(swarm: Swarm, numbers: Iterable[int]) -> None:
    """Put each behind a router of its own."""
    for number in numbers:
        swarm.network.behind(Nat(router(number), symmetric=True), address(number))


def part(swarm: Swarm, one: int, other: int) -> None:
    swarm.network.cut(address(one), address(other))
    swarm.network.cut(address(other), address(one))


def counts(swarm: Swarm) -> dict[str, float]:
    return {host.name: host.living.overlay.workers() for host in swarm.running()}


async def until_all_count(swarm: Swarm, expected: float, *, within_s: float, what: str) -> float:
    return await swarm.until(lambda: set(counts(swarm).values()) == {expected}, within_s=within_s, what=what)


def star(swarm: Swarm) -> None:
    """One reachable node."""
    hide(swarm, range(1, NODES))


def two_reachable(swarm: Swarm) -> None:
    """Two that all reach."""
    hide(swarm, range(2, NODES))


def holes(swarm: Swarm) -> None:
    """All are reachable, and three pairs do not reach each other."""
    for one in (1, 2, 3):
        part(swarm, one, one + 2)


@pytest.mark.parametrize("shape", [holes, *more(star, two_reachable)])
@run_by(run, limit_s=3600)
async def test_all_count_all_and_take_places_of_their_own(shape: Callable[[Swarm], None]) -> None:
    """Within seconds, with the steps, step times and samples of all: nobody is waited for less than in one network. No
    death, no suspicion, and nothing to report."""
    swarm = swarm_of(81)
    shape(swarm)
    swarm.start_many(NODES)
    await until_all_count(swarm, NODES, within_s=5, what="all count all")
    await asyncio.sleep(30)
    now = swarm.clock.monotonic()
    hosts = [host.living for host in swarm.running()]
    assert sorted(node_index(host.overlay, now) for host in hosts) == list(range(NODES))
    steps = {host.overlay.node_id: host.progress.step for host in hosts}
    assert min(steps.values()) > 25
    for host in hosts:
        assert len(host.overlay.sample(NODES)) == NODES - 1
        for peer in host.overlay.members():
            # Asked in turn, about one in a step; of twelve seeds the oldest was nine steps old.
            assert peer.step >= steps[peer.node_id] - 2 * NODES
            assert peer.step_seconds > 0
            assert peer.samples > 0
        assert host.exchange.view.counts.lasting() == []
    assert not swarm.of("peer_suspect")
    await swarm.stop()


@run_by(run, limit_s=3600)
async def test_the_deltas_of_a_step_weigh_one_together() -> None:
    """From the first steps on, in which a hidden node knows the reachable one alone: the owner lowers its weights."""
    swarm = swarm_of(82, lambda _: 0.1)
    star(swarm)
    swarm.start_many(NODES)
    await swarm.until(
        lambda: all(host.living.progress.step >= 30 for host in swarm.hosts.values()), within_s=60, what="30 steps"
    )
    halved = [record for record in swarm.of("step") if record.fields["weight"] == 1 / 2]
    assert {record.node for record in halved} >= {f"n{number}" for number in range(1, NODES)}
    store = swarm.hosts["n0"].exchange.store
    assert len(store.owned) == SHARDS
    for shard in store.owned:
        weights: dict[int, float] = defaultdict(float)
        for entry in store.log.entries(shard):
            weights[entry.identity.step] += entry.weight
        assert max(weights[step] for step in range(2, 5)) < 1.5, "some join after the first step of others"
        assert [weights[step] for step in range(5, 30)] == pytest.approx([1.0] * 25)
    await swarm.stop()


@run_by(run, limit_s=3600)
async def test_a_hidden_node_that_dies_leaves_all_counts_and_comes_back() -> None:
    """Within the detection bound, with lost datagrams. When the reachable one dies, each knows that it is alone."""
    swarm = swarm_of(83)
    swarm.network.loss = 0.02
    star(swarm)
    swarm.start_many(NODES)
    await until_all_count(swarm, NODES, within_s=10, what="all count all")
    await swarm.kill("n3", refused=False)
    await until_all_count(swarm, NODES - 1, within_s=BOUND_S, what="it is missed by all")
    swarm.start("n3", bootstrap="n0")
    await until_all_count(swarm, NODES, within_s=15, what="it is counted again")
    await swarm.kill("n0", refused=False)
    await until_all_count(swarm, 1, within_s=BOUND_S, what="all are alone")
    await swarm.stop()


@run_by(run, limit_s=3600)
async def test_the_sides_of_a_split_count_their_own() -> None:
    """And all again when it has healed."""
    swarm = swarm_of(84)
    two_reachable(swarm)
    swarm.start_many(NODES)
    await until_all_count(swarm, NODES, within_s=10, what="all count all")
    sides = (0, 2, 3), (1, 4, 5)
    swarm.network.partition(*([name(number) for number in side for name in (address, router)] for side in sides))
    await until_all_count(swarm, NODES / 2, within_s=BOUND_S, what="each side counts its own")
    swarm.network.heal()
    await until_all_count(swarm, NODES, within_s=60, what="all count all again")
    await swarm.stop()


@run_by(run, limit_s=3600)
async def test_under_bsp_nobody_is_two_steps_ahead_of_a_node_that_it_does_not_hear() -> None:
    """A barrier that is complete by definition waits for all."""
    swarm = swarm_of(85, lambda name: 1.0 if name == "n5" else 0.2, barrier__method="bsp")
    star(swarm)
    swarm.start_many(NODES)
    await until_all_count(swarm, NODES, within_s=10, what="all count all")
    spread: list[int] = []
    for _ in range(400):
        await asyncio.sleep(0.05)
        steps = swarm.steps()
        spread.append(max(steps) - min(steps))
    assert min(steps) > 10
    assert max(spread[100:]) == 1
    await swarm.stop()


@run_by(run, limit_s=3600)
async def test_a_hole_that_opens_between_members_leaves_their_steps_known() -> None:
    """The member that both reach passes them on: a barrier would wait for the last step that was heard."""
    swarm = swarm_of(86)
    swarm.start_many(3)
    await until_all_count(swarm, 3, within_s=10, what="all count all")
    part(swarm, 1, 2)
    await asyncio.sleep(BOUND_S)
    one, other = swarm.hosts["n1"].living, swarm.hosts["n2"].living
    for _ in range(10):
        step = other.progress.step
        await swarm.until(lambda step=step: other.progress.step > step, within_s=10, what="it makes a step")
        await one.overlay.query_steps([other.overlay.node_id])
        peer = one.overlay.peers.get(other.overlay.node_id)
        assert peer is not None
        assert peer.step >= step
    assert set(counts(swarm).values()) == {3.0}
    assert not swarm.of("peer_dead")
    await swarm.stop()
