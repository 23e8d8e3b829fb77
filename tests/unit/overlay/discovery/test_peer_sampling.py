"""The peer sampler: population and workers from few facts, which peers are drawn, and what a lookup adds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.discovery.peer_sampling import MAX_BALLS, MIN_PAUSE_PER_LOOKUP, PeerSampler
from p2pnode.overlay.discovery.population import Population
from p2pnode.overlay.discovery.sampling import SamplePool, is_kept
from p2pnode.overlay.ids import distance
from p2pnode.overlay.kademlia.calls import NegativeCache
from p2pnode.overlay.local_node import LocalNode
from p2pnode.overlay.peers import Activity, Contact, PeerChange, PeerTable
from tests.harness.builders.peers import heartbeat, ids
from tests.harness.environment.simulated import make_environment
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.harness.swarms.overlay_draws import draw_naively, draw_with_truth, judge

OWN, *OTHERS = ids(301)
K = 20
HERE = Address("10.0.1.1", 8468)


class World:
    """One node that knows some peers of a swarm of 300, and lookups that are never wrong."""

    def __init__(self, known: Sequence[bytes], *, activity: Activity = Activity.TRAINING) -> None:
        self.peers = PeerTable()
        self.suspects: list[bytes] = []
        self.verified: list[bytes] = []
        #: Who has named each of them.
        self.named_by: list[Contact] = []
        #: Who hears a member that this node does not hear.
        self.helpers: dict[bytes, Contact] = {}
        self.lookups = 0
        self.lookup_s = 0.01
        self.told: list[Contact] = []
        self.asked = 0
        self.ends_when_asked = False
        self.changed: list[Callable[[PeerChange], None]] = []
        self.environment = make_environment()
        for node_id in known:
            self.meet(node_id, activity)
        members = SimpleNamespace(
            peers=self.peers,
            peer=self.peers.get,
            contact=lambda node_id: None if (peer := self.peers.get(node_id)) is None else peer.contact,
            all_known=lambda: len(self.peers) < K,
            helper=self.helpers.get,
            negative=NegativeCache(),
            detector=SimpleNamespace(is_suspect=lambda node_id: node_id in self.suspects),
        )
        membership: Any = SimpleNamespace(
            members=members,
            on_change=self.changed.append,
            verify=self._verify,
        )
        #: The nodes asked by the widest lookup of the own id.
        self.asked_near: int | None = K - 1
        self.targets: list[bytes] = []
        lookups: Any = SimpleNamespace(
            find=self._find, ask=self._ask, most_asked=lambda target: self.asked_near if target == OWN else None
        )
        self.local = LocalNode(OWN, 1, 1, "tests", Address("10.0.0.1", 8468))
        self.sampler = PeerSampler(self.local, K, membership, lookups, self.environment)

    def _verify(self, contact: Contact, named_by: Contact) -> None:
        self.verified.append(contact.node_id)
        self.named_by.append(named_by)

    def meet(self, node_id: bytes, activity: Activity, **known: object) -> None:
        now = self.environment.clock.monotonic()
        self.peers.observe(heartbeat(node_id, activity=int(activity), **known), HERE, now)

    async def _find(self, target: bytes) -> list[Contact]:
        self.lookups += 1
        self.targets.append(target)
        await asyncio.sleep(self.lookup_s)
        closest = sorted([OWN, *OTHERS], key=lambda node_id: distance(target, node_id))[:K]
        return [Contact(node_id, HERE) for node_id in closest]

    async def _ask(self, contact: Contact, _target: bytes) -> list[Contact]:
        assert contact.node_id in self.peers
        assert contact.node_id not in self.helpers, "it would not answer"
        self.asked += 1
        if self.ends_when_asked:
            self.peers.remove(contact.node_id)
        return self.told


async def for_a_while(work: Coroutine[Any, Any, None], seconds: float) -> None:
    task = asyncio.create_task(work, name="under test")
    await asyncio.sleep(seconds)
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@run_by(run)
async def test_a_small_swarm_is_counted_and_a_large_one_bounded_until_the_first_lookup() -> None:
    """Up to k nodes are counted; beyond, the known peers are a lower bound."""
    assert World(OTHERS[: K - 1]).sampler.population() == Population(20.0, 20.0, 20.0, True, 0, 20.0)
    assert World(OTHERS[:K]).sampler.population() == Population(21.0, 20.0, 84.0, False, 0)


@run_by(run)
async def test_lookups_estimate_the_swarm_and_fill_the_pool() -> None:
    """The true size is in the interval, the pool has no own id, and the pool is reported."""
    world = World(OTHERS[:30])
    for _ in range(200):
        await world.sampler.sample_once()
        assert OWN not in world.sampler.pool.ids()
    population = world.sampler.population()
    assert population.low <= 301 <= population.high

    pool = world.sampler.report()
    assert (pool.balls, pool.pool) == (world.sampler.pool.balls, len(world.sampler.pool.ids()))
    assert pool.balls > 0


@run_by(run)
async def test_a_lookup_cut_off_is_no_evidence() -> None:
    """Fewer than k nodes do not mean that the swarm has so few."""
    world = World(OTHERS[:30])
    lookups: Any = world.sampler._lookups

    async def cut_off(_target: bytes) -> list[Contact]:
        return [Contact(OTHERS[0], HERE)]

    lookups.find = cut_off
    await world.sampler.sample_once()
    assert world.sampler.estimator.estimate(world.environment.clock.monotonic()) is None


@run_by(run)
async def test_workers_are_the_nodes_that_train_or_are_ready() -> None:
    """Counted in a small swarm, this node included if it trains; at least 1."""
    world = World(OTHERS[:3])
    world.meet(OTHERS[3], Activity.READY)
    world.meet(OTHERS[4], Activity.PAUSED)
    assert world.sampler.workers() == 4.0
    world.local.announce(activity=Activity.TRAINING)
    assert world.sampler.workers() == 5.0
    assert World([], activity=Activity.PAUSED).sampler.workers() == 1.0


@run_by(run)
async def test_a_long_first_step_is_work() -> None:
    """A peer whose first step takes longer than a stall counts until that is known; one that stands still later does
    not. Otherwise the first deltas of all would weigh as if each were alone."""
    world = World([])
    world.meet(OTHERS[0], Activity.TRAINING)
    world.meet(OTHERS[1], Activity.TRAINING, step=3, step_seconds=0.5)
    assert world.sampler.workers() == 2.0
    for _ in range(4):
        await asyncio.sleep(5.0)
        world.meet(OTHERS[0], Activity.TRAINING)
        world.meet(OTHERS[1], Activity.TRAINING, step=3, step_seconds=0.5)
    assert world.sampler.workers() == 1.0
    world.local.announce(activity=Activity.TRAINING)
    assert world.sampler.workers() == 2.0


@run_by(run)
async def test_workers_of_a_large_swarm_are_the_share_of_the_pool_times_the_estimate() -> None:
    """With half of the known pool in training, about half of the estimate trains."""
    world = World([])
    for number, node_id in enumerate(OTHERS):
        world.meet(node_id, Activity.TRAINING if number % 2 else Activity.PAUSED)
    for _ in range(64):
        await world.sampler.sample_once()
    share = world.sampler.workers() / world.sampler.population().estimate
    assert share == pytest.approx(0.5, abs=0.12)


@run_by(run)
async def test_samples_have_only_peers_that_count_and_are_not_suspected() -> None:
    """All known peers in a small swarm; without replacement."""
    world = World(OTHERS[:6])
    world.meet(OTHERS[6], Activity.PAUSED)
    world.suspects.append(OTHERS[0])
    drawn = [peer.node_id for peer in world.sampler.sample(50)]

    assert sorted(drawn) == sorted(OTHERS[1:6])
    assert len(world.sampler.sample(2)) == 2


@run_by(run)
async def test_a_pool_that_is_not_full_yet_is_completed_from_the_known_peers() -> None:
    """A node that just joined a large swarm can sample at once, and never draws a peer twice."""
    world = World(OTHERS[:40])
    world.sampler.pool.add(OTHERS[:3], world.environment.clock.monotonic(), 12)
    drawn = [peer.node_id for peer in world.sampler.sample(10)]

    assert len(drawn) == len(set(drawn)) == 10


@run_by(run)
async def test_nodes_that_are_gone_leave_the_pool() -> None:
    """Those that are suspected stay."""
    world = World(OTHERS[:40])
    world.sampler.pool.add(OTHERS[:3], world.environment.clock.monotonic(), 12)
    for node_id, kind in ((OTHERS[0], "dead"), (OTHERS[1], "left"), (OTHERS[2], "suspect")):
        for callback in world.changed:
            callback(PeerChange(node_id, kind))  # type: ignore[arg-type]

    assert world.sampler.pool.ids() == [OTHERS[2]]


@run_by(run)
async def test_a_small_swarm_compares_contacts_and_looks_nothing_up() -> None:
    """Contacts that are unknown here are verified; known ones are not. A member that does not answer is not asked."""
    world = World(OTHERS[:4])
    world.helpers[OTHERS[3]] = Contact(OTHERS[0], HERE)
    world.told = [Contact(OTHERS[0], HERE), Contact(OTHERS[9], HERE)]
    await for_a_while(world.sampler.keep_sampling(), 3.0)
    assert set(world.verified) == {OTHERS[9]}
    assert world.lookups == 0
    often = world.asked

    world.told = []
    await for_a_while(world.sampler.keep_sampling(), 30.0)
    assert world.asked - often < 5 + 30 / 3
    assert often >= 6


@run_by(run)
async def test_who_has_named_a_node_has_an_address_even_if_it_is_gone_since() -> None:
    """It is removed while it answers: what was known of it must not be read afterwards."""
    world = World(OTHERS[:1])
    world.told, world.ends_when_asked = [Contact(OTHERS[9], HERE)], True
    await for_a_while(world.sampler.keep_sampling(), 0.1)
    assert world.named_by == [Contact(OTHERS[0], HERE)]


@run_by(run)
async def test_the_pool_grows_for_large_samples_and_slow_lookups_are_spaced() -> None:
    """The number of balls is bounded; a pause is at least four times as long as the lookup before it."""
    world = World(OTHERS[:40])
    world.lookup_s = 2.0
    await for_a_while(world.sampler.keep_sampling(), 100.0)
    assert world.lookups <= 1 + 100.0 / (2.0 + 0.75 * 2.0 * MIN_PAUSE_PER_LOOKUP)

    before = world.sampler._steady_s()
    world.sampler.sample(40)
    assert world.sampler._steady_s() < before
    world.sampler.sample(10_000)
    assert world.sampler._balls_wanted == MAX_BALLS


@pytest.mark.parametrize("known", [2, 60])
@run_by(run)
async def test_a_node_that_came_before_its_neighbours_looks_up_its_id_until_they_have_been_asked(known: int) -> None:
    """The first of many that join at one moment asked hardly anyone: it looks again once it hears of more than k
    nodes, or has met them, and not when that lookup is under way or has asked k."""
    for asked_near, expected in ((2, True), (None, False), (K - 1, False)):
        world = World(OTHERS[:known])
        world.asked_near = asked_near
        world.told = [Contact(node_id, HERE) for node_id in OTHERS[: 2 * K]]
        await for_a_while(world.sampler.keep_sampling(), 1.2)
        assert (OWN in world.targets) == expected
        assert world.verified == [], "it does not meet the contacts of one node, but its own neighbours"

        world.asked_near, world.targets = K - 1, []
        await for_a_while(world.sampler.keep_sampling(), 1.2)
        assert OWN not in world.targets


@pytest.mark.parametrize("known", [2, 60])
@run_by(run)
async def test_lookups_of_the_own_id_are_spaced_when_they_take_long(known: int) -> None:
    """On an overloaded loop a lookup takes two seconds: the next comes eight seconds after it, at the earliest."""
    world = World(OTHERS[:known])
    world.asked_near, world.lookup_s = 2, 2.0
    world.told = [Contact(node_id, HERE) for node_id in OTHERS[: 2 * K]]
    seconds = 60.0
    await for_a_while(world.sampler.keep_sampling(), seconds)
    assert 3 <= world.targets.count(OWN) <= seconds / (2.0 * (1 + MIN_PAUSE_PER_LOOKUP)) + 1


@run_by(run)
async def test_a_small_swarm_is_not_looked_up_again() -> None:
    """A node that asked two others and hears of no more than k has found all there are."""
    world = World(OTHERS[:2])
    world.asked_near = 2
    world.told = [Contact(node_id, HERE) for node_id in OTHERS[:2]]
    await for_a_while(world.sampler.keep_sampling(), 30.0)
    assert world.lookups == 0


@pytest.mark.promise(9)
def test_draws_from_the_pool_are_uniform_and_the_closest_node_is_not() -> None:
    """Chi-square over 100 nodes and 3,000 draws: the pool passes at p > 0.001, "closest to a random id" cannot."""
    print("seed 2")
    ours, naive = draw_with_truth(2, 100, 3_000), draw_naively(2, 100, 3_000)
    print(ours, naive, sep="\n")

    assert ours.p_value > 0.001
    assert naive.p_value < 1e-9
    assert naive.total_variation > 0.2
    assert ours.total_variation < 1.2 * ours.noise


def test_the_chi_square_test_finds_a_small_bias() -> None:
    """A tenth of 200 nodes drawn a tenth too often fails at 200,000 draws; fair counts do not."""
    print("seed 3")
    rng = random.Random(3)
    weights = [1.1 if number < 20 else 1.0 for number in range(200)]
    biased, fair = [0] * 200, [0] * 200
    for number in rng.choices(range(200), weights, k=200_000):
        biased[number] += 1
    for number in rng.choices(range(200), k=200_000):
        fair[number] += 1

    assert judge(biased).p_value < 1e-6
    assert judge(fair).p_value > 0.001


def test_a_ball_is_kept_in_proportion_to_its_size() -> None:
    """|S| / m: never when empty, always when full."""
    rng = random.Random(4)
    kept = [sum(is_kept(size, rng) for _ in range(4000)) / 4000 for size in (0, 5, 10, 20)]

    assert kept == pytest.approx([0, 0.25, 0.5, 1], abs=0.03)


def test_a_sample_takes_each_peer_from_another_ball_while_there_are_balls() -> None:
    """Four balls, four peers: one of each, whatever their size; the fifth comes from any."""
    rng = random.Random(5)
    nodes = ids(40)
    pool = SamplePool()
    balls = [nodes[0:3], nodes[3:20], nodes[20:25], nodes[25:40]]
    for ball in balls:
        pool.add(ball, 0.0, 12)
    for _ in range(50):
        drawn = pool.sample(4, lambda _: True, rng)
        assert sorted(sum(node_id in ball for node_id in drawn) for ball in balls) == [1, 1, 1, 1]
        assert len(set(pool.sample(5, lambda _: True, rng))) == 5


def test_dead_nodes_leave_a_pool_and_the_oldest_ball_is_dropped() -> None:
    """A discarded node is in no ball; beyond its size a pool drops the oldest ball; its age is known."""
    nodes = ids(30)
    pool = SamplePool()
    for at in range(5):
        pool.add(nodes[5 * at : 5 * at + 7], float(at), 3)
    assert pool.balls == 3
    assert pool.oldest_s(10.0) == 8.0
    assert nodes[5] not in pool.ids()
    pool.discard(nodes[15])
    pool.discard(nodes[0])
    assert nodes[15] not in pool.ids()
    assert len(pool.ids()) == 16


def test_a_pool_forgets_and_draws_without_replacement() -> None:
    """Balls age out after two minutes; a sample has only allowed nodes, and none twice."""
    pool = SamplePool()
    nodes = ids(12)
    pool.add(nodes[:8], 0.0, 12)
    pool.add(nodes[4:], 60.0, 12)
    drawn = pool.sample(20, lambda node_id: node_id != nodes[5], random.Random(1))

    assert sorted(drawn) == sorted(set(nodes) - {nodes[5]})
    pool.expire(121.0)
    assert pool.ids() == nodes[4:]
