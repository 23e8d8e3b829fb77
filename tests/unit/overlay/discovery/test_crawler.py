"""The crawler: how a crawl covers the id space, and when it and the refresh run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.discovery.crawler import CRAWL_INTERVAL_S, REFRESH_DELAY_S, REFRESH_INTERVAL_S, Crawler
from p2pnode.overlay.discovery.population import Population
from p2pnode.overlay.ids import distance
from p2pnode.overlay.local_node import LocalNode
from p2pnode.overlay.membership.stream_movement import StreamMovement
from p2pnode.overlay.peers import Activity, Contact, PeerChange, PeerTable
from tests.harness.builders.peers import heartbeat, ids
from tests.harness.environment.simulated import make_environment
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.harness.stubs.stream_stub import StreamStub

OWN, *NODES = ids(201)
K = 20


class World:
    """One node in a swarm of 200 others, and lookups that are never wrong."""

    def __init__(self, *, knows_all: bool = False) -> None:
        self.knows_all = knows_all
        self.targets: list[bytes] = []
        self.found: dict[bytes, None] = {}
        self.forgotten: list[frozenset[bytes]] = []
        self.expired = 0
        self.peers = PeerTable()
        self.changed: list[Callable[[PeerChange], None]] = []
        environment = make_environment()
        self.movement = StreamMovement()
        members = SimpleNamespace(
            peers=self.peers,
            all_known=lambda: self.knows_all,
            forget_unused=self.forgotten.append,
            movement=self.movement,
        )
        population = Population(200.0, 150.0, 250.0, False, 8)
        membership: Any = SimpleNamespace(members=members, on_change=self.changed.append)
        lookups: Any = SimpleNamespace(find=self._find)
        sampler: Any = SimpleNamespace(population=lambda: population, pool=SimpleNamespace(ids=lambda: NODES[:3]))
        candidates: Any = SimpleNamespace(expire=self._expire)
        local = LocalNode(OWN, 1, 1, "tests", Address("10.0.0.1", 8468))
        self.crawler = Crawler(local, K, membership, lookups, sampler, candidates, environment)

    def _expire(self) -> None:
        self.expired += 1

    async def _find(self, target: bytes) -> list[Contact]:
        self.targets.append(target)
        await asyncio.sleep(0.01)
        closest = sorted(NODES, key=lambda node_id: distance(target, node_id))[:K]
        self.found.update(dict.fromkeys(closest))
        return [Contact(node_id, Address("10.0.1.1", 8468)) for node_id in closest]


async def for_a_while(work: Coroutine[Any, Any, None], seconds: float) -> None:
    task = asyncio.create_task(work, name="under test")
    await asyncio.sleep(seconds)
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("estimate", [200.0, 40.0, 2000.0])
@run_by(run)
async def test_a_crawl_finds_every_node_whatever_the_estimate(estimate: float) -> None:
    """A zone whose lookup was full is split, so that an estimate far too low loses no node."""
    world = World()
    sampler: Any = world.crawler._sampler
    sampler.population = lambda: Population(estimate, estimate, estimate, False, 8)
    await world.crawler.crawl()

    assert set(world.found) == set(NODES)


@run_by(run)
async def test_crawls_repeat_only_while_all_members_are_asked_for() -> None:
    """Each call of `all_members` keeps them going for two intervals; where every peer is known, none starts."""
    world = World()
    task = asyncio.create_task(world.crawler.keep_crawling(), name="crawl")
    await asyncio.sleep(2 * CRAWL_INTERVAL_S)
    assert world.targets == []

    world.crawler.all_members()
    await asyncio.sleep(20 * CRAWL_INTERVAL_S)
    once = len(world.targets)
    crawls = once / len(set(world.targets[: once // 2]))
    assert once > 0
    await asyncio.sleep(20 * CRAWL_INTERVAL_S)
    assert len(world.targets) == once, f"still crawling after {crawls:.0f} crawls"

    world.knows_all = True
    world.crawler.all_members()
    await asyncio.sleep(2 * CRAWL_INTERVAL_S)
    assert len(world.targets) == once
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@run_by(run)
async def test_all_members_are_the_peers_that_count_for_barriers() -> None:
    """A peer that joins or pauses is left out."""
    world = World(knows_all=True)
    now = asyncio.get_running_loop().time()
    for node_id, activity in zip(NODES, (Activity.TRAINING, Activity.JOINING, Activity.PAUSED), strict=False):
        world.peers.observe(heartbeat(node_id, activity=int(activity)), Address("10.0.1.1", 8468), now)

    assert [peer.node_id for peer in world.crawler.all_members()] == [NODES[0]]


@run_by(run)
async def test_the_own_id_is_looked_up_every_minute_and_soon_after_a_return() -> None:
    """A returned peer is one of a partition; after any other change the refresh waits."""
    world = World(knows_all=True)
    world.movement.add(NODES[0], StreamStub())
    assert len(world.movement) == 1
    task = asyncio.create_task(world.crawler.keep_table_fresh(), name="refresh")
    await asyncio.sleep(0.5 * REFRESH_INTERVAL_S)
    world.changed[0](PeerChange(NODES[0], "up"))
    await asyncio.sleep(2 * REFRESH_DELAY_S)
    assert world.targets == []
    world.changed[0](PeerChange(NODES[0], "returned"))
    await asyncio.sleep(2 * REFRESH_DELAY_S)
    assert world.targets == [OWN]
    await asyncio.sleep(1.3 * REFRESH_INTERVAL_S)
    assert set(world.targets) == {OWN}
    assert 2 <= len(world.targets) <= 3
    assert world.expired == len(world.targets)
    assert len(world.movement) == 0, "that stream has ended"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@run_by(run)
async def test_a_large_swarm_refreshes_a_far_bucket_and_drops_unused_peers() -> None:
    """The second target shares a short prefix with the own id; while a crawl runs, no peer is dropped."""
    world = World()
    await for_a_while(world.crawler.keep_table_fresh(), 40 * REFRESH_INTERVAL_S)
    far = {160 - distance(OWN, target).bit_length() for target in world.targets if target != OWN}
    assert far == set(range(8))
    assert set(world.forgotten) == {frozenset(NODES[:3])}

    world.forgotten.clear()
    world.crawler.all_members()
    world.changed[0](PeerChange(NODES[0], "returned"))
    await for_a_while(world.crawler.keep_table_fresh(), 1.0)
    assert world.forgotten == []
