"""Candidates for a key: who is eligible, when a lookup is needed, and when it is needed again."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.discovery.candidates import LOOKUP_INTERVAL_S, Candidates
from p2pnode.overlay.discovery.placement import _negative_log2, rank, weight
from p2pnode.overlay.ids import distance, key_id
from p2pnode.overlay.line.capacity import FLOOR_CLASSES, MAX_CLASSES_ABOVE, TOP_CLASS
from p2pnode.overlay.local_node import LocalNode
from p2pnode.overlay.membership.service import STREAM_FAILURES
from p2pnode.overlay.peers import Activity, Contact
from tests.harness.builders.peers import heartbeat, ids
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.harness.stubs.recording_protocol import OWN, MembershipWorld

OTHERS = ids(30)
KEY = b"k" * 20
K = 20


class World(MembershipWorld):
    """One node, its peers, and lookups that return what the test sets."""

    def __init__(self, peers: Sequence[bytes], *, knows_all: bool = True) -> None:
        super().__init__()
        self.local = LocalNode(OWN, 1, 1, "tests", Address("10.0.0.1", 8468))
        self.local.set_reached(True)
        self.result: list[Contact] | Exception = []
        self.lookups = 0
        for node_id in peers:
            self.meet(node_id)
        lookups: Any = SimpleNamespace(find=self._find)
        sampler: Any = SimpleNamespace(knows_nearly_all=lambda: knows_all)
        self.candidates = Candidates(self.local, K, self.membership, lookups, sampler, self.clock)

    def meet(self, node_id: bytes, **changes: object) -> None:
        fields: dict[str, object] = {"eligible": True, "activity": int(Activity.TRAINING), **changes}
        home = Contact(node_id, Address(f"10.0.1.{OTHERS.index(node_id)}", 8468))
        self.answered(heartbeat(node_id, **fields), home)

    async def _find(self, key: bytes) -> list[Contact]:
        assert key == KEY
        self.lookups += 1
        await asyncio.sleep(0.1)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    async def of(self) -> list[bytes]:
        return [contact.node_id for contact in await self.candidates.of(KEY)]


@run_by(run)
async def test_a_node_that_knows_all_others_needs_no_lookup() -> None:
    """The candidates are all nodes in rendezvous order, this one included."""
    world = World(OTHERS[:5])
    assert await world.of() == rank(KEY, [OWN, *OTHERS[:5]])
    assert world.lookups == 0
    world.local.set_reached(False)
    assert await world.of() == rank(KEY, OTHERS[:5])


@run_by(run)
async def test_only_peers_that_can_take_a_shard_now_are_candidates() -> None:
    """Not eligible, leaving, suspected, or with failing streams: each is enough to be left out."""
    world = World(OTHERS[:2])
    world.meet(OTHERS[2], eligible=False)
    for node_id in OTHERS[3:6]:
        world.meet(node_id)
    world.meet(OTHERS[3], activity=int(Activity.LEAVING))
    world.members.on_unreachable(OTHERS[4])
    for _ in range(STREAM_FAILURES):
        world.membership.on_stream_failure(Contact(OTHERS[5], Address("10.0.1.5", 8468)), "reset")

    assert sorted(await world.of()) == sorted([OWN, *OTHERS[:2]])


@run_by(run)
async def test_only_the_k_closest_known_nodes_are_candidates() -> None:
    """Nodes of a lookup count only while they are known peers."""
    world = World(OTHERS[:-1], knows_all=False)
    world.result = [Contact(OTHERS[-1], Address("10.0.1.1", 8468))]
    closest = sorted([OWN, *OTHERS[:-1]], key=lambda node_id: distance(KEY, node_id))[:K]

    assert await world.of() == rank(KEY, closest)


@pytest.mark.parametrize("knows_all", [True, False])
@run_by(run)
async def test_several_keys_have_the_candidates_that_each_of_them_has_alone(knows_all: bool) -> None:
    """Each key in its own order and with its own closest nodes; in a swarm that is known each peer is asked once."""
    world = World(OTHERS[:-1], knows_all=knows_all)
    world.members.on_unreachable(OTHERS[3])
    asked: list[bytes] = []
    is_reachable = world.candidates._is_reachable
    world.candidates._lookups.find = lambda _key: asyncio.sleep(0.1, [])  # type: ignore[method-assign,assignment]
    keys = [bytes([number]) * 20 for number in range(0, 250, 25)]
    alone = [await world.candidates.of(key) for key in keys]
    world.candidates._is_reachable = lambda node_id: not asked.append(node_id) and is_reachable(node_id)  # type: ignore[method-assign,func-returns-value]

    assert await world.candidates.of_all(keys) == alone
    assert len({tuple(one) for one in alone}) == len(keys)
    assert all(len(one) in (K, K - 1) for one in alone)
    assert len(asked) == len(set(asked)) or not knows_all


@run_by(run)
async def test_a_node_that_fails_during_a_lookup_is_no_candidate_of_the_next_key() -> None:
    """What is known of the peers is used for several keys only as long as nothing is waited for."""
    world = World(OTHERS[:3], knows_all=False)

    async def find(_key: bytes) -> list[Contact]:
        await asyncio.sleep(0.1)
        if world.lookups:
            world.members.on_unreachable(OTHERS[0])
        world.lookups += 1
        return []

    world.candidates._lookups.find = find  # type: ignore[method-assign]
    first, second = await world.candidates.of_all([KEY, bytes(20)])
    assert OTHERS[0] in [contact.node_id for contact in first]
    assert OTHERS[0] not in [contact.node_id for contact in second]


@run_by(run)
async def test_the_order_follows_each_change_of_a_candidate() -> None:
    """A new capacity class, and a candidate that is suspected."""
    world = World(OTHERS[:3])
    assert await world.of() == rank(KEY, [OWN, *OTHERS[:3]])
    world.members.peers.note_capacity(OTHERS[0], TOP_CLASS)
    fast = dict.fromkeys((OWN, *OTHERS[1:3]), 0) | {OTHERS[0]: TOP_CLASS}
    assert await world.of() == rank(KEY, fast, fast)
    world.members.on_unreachable(OTHERS[1])
    del fast[OTHERS[1]]
    assert await world.of() == rank(KEY, fast, fast)


@run_by(run)
async def test_a_lookup_is_used_for_a_while_and_shared() -> None:
    """Concurrent calls wait for one lookup, later ones make none until it is too old."""
    world = World(OTHERS[:3], knows_all=False)
    await asyncio.gather(*(world.of() for _ in range(5)))
    await asyncio.sleep(LOOKUP_INTERVAL_S - 1)
    await world.of()
    assert world.lookups == 1

    await asyncio.sleep(2)
    await world.of()
    assert world.lookups == 2
    assert len(world.candidates._looked_up) == 1
    await asyncio.sleep(LOOKUP_INTERVAL_S + 1)
    world.candidates.expire()
    assert world.candidates._looked_up == {}


@run_by(run)
async def test_a_failed_lookup_is_an_error_for_its_caller_only() -> None:
    """The calls that waited for it use the known peers."""
    world = World(OTHERS[:3], knows_all=False)
    world.result = ConnectionError("closed")
    first, second = await asyncio.gather(world.of(), world.of(), return_exceptions=True)

    assert isinstance(first, ConnectionError)
    assert second == rank(KEY, [OWN, *OTHERS[:3]])
    assert world.lookups == 1


@run_by(run)
async def test_candidates_are_ranked_by_what_they_announced_and_by_the_own_line() -> None:
    """A peer under the floor is left out, and so is this node when its own line is."""
    world = World(OTHERS[:4])
    for node_id in OTHERS[:4]:
        world.members.peers.note_capacity(node_id, 10)
    world.members.peers.note_capacity(OTHERS[0], 3)
    assert {each.node_id for each in await world.candidates.of(KEY)} == {OWN, *OTHERS[1:4]}
    assert [world.candidates.capacity(each) for each in (OWN, OTHERS[0], OTHERS[1], b"unknown")] == [0, 3, 10, 0]

    for _ in range(200):
        world.local.line.sent(0.25, 10_000, is_busy=True, is_full=True)
    assert {each.node_id for each in await world.candidates.of(KEY)} == set(OTHERS[1:4])


def keys_of(count: int) -> list[bytes]:
    return [key_id(number.to_bytes(4, "big")) for number in range(count)]


def test_a_leave_moves_only_its_own_share() -> None:
    """Without a node only its keys move; the shares are balanced."""
    nodes = ids(10)
    keys = [key_id(bytes([number // 256, number % 256])) for number in range(2000)]
    before = {key: rank(key, nodes)[0] for key in keys}
    after = {key: rank(key, nodes[1:])[0] for key in keys}
    shares = [sum(owner == node for owner in before.values()) for node in nodes]

    assert all(after[key] == before[key] for key in keys if before[key] != nodes[0])
    assert min(shares) > 140
    assert max(shares) < 260
    assert rank(keys[0], reversed(nodes)) == rank(keys[0], nodes)


@given(seed=st.integers(0, 2**32), count=st.integers(1, 40), capacity=st.integers(0, 14))
@settings(max_examples=100, deadline=None)
def test_equal_capacities_give_the_order_of_the_hashes(seed: int, count: int, capacity: int) -> None:
    """With one class, known or not, the order is by decreasing hash, as nodes without capacities rank."""
    nodes = ids(count, seed)
    key = random.Random(seed).randbytes(20)
    by_hash = sorted(nodes, key=lambda node: (weight(key, node), node), reverse=True)

    assert rank(key, nodes) == by_hash
    assert rank(key, nodes, dict.fromkeys(nodes, capacity)) == by_hash
    assert rank(key, nodes, dict.fromkeys(nodes[::2], capacity)) == by_hash  # the others are unknown: the median


@given(seed=st.integers(0, 2**32), data=st.data())
@settings(max_examples=100, deadline=None)
def test_nodes_of_one_class_keep_the_order_of_their_hashes_among_faster_and_slower_ones(
    seed: int, data: st.DataObject
) -> None:
    """Within a class the hash decides, whatever the classes of the others."""
    nodes = ids(20, seed)
    key = random.Random(seed).randbytes(20)
    classes = {node: data.draw(st.integers(8, 11)) for node in nodes}
    ranked = rank(key, nodes, classes)

    for value in set(classes.values()):
        same = [node for node in ranked if classes[node] == value]
        assert same == sorted(same, key=lambda node: (weight(key, node), node), reverse=True)


@given(first=st.integers(0, 2**64 - 1), distance=st.integers(0, 2**40))
@settings(max_examples=250, deadline=None)
def test_the_integer_logarithm_is_exact_to_its_last_bits_and_never_rises(first: int, distance: int) -> None:
    """It agrees with the logarithm of the library to 2⁻³¹, and a larger hash never costs more."""
    second = min(first + distance, 2**64 - 1)

    assert _negative_log2(first) >= _negative_log2(second)
    exact = 65 - math.log2(2 * first + 1)
    assert _negative_log2(first) / 2**32 == pytest.approx(exact, abs=2**-30)
    assert _negative_log2(first) >= 0


@pytest.mark.parametrize("exponents", [(0, 0, 0, 1), (-3, 0, 0, 0, 2), (-2, -1, 0, 0, 1, 3)])
def test_shares_are_in_proportion_to_the_weights(exponents: tuple[int, ...]) -> None:
    """Of 4,000 keys each node owns its share within four standard deviations."""
    nodes = ids(len(exponents), 3)
    classes = {node: 9 + exponent for node, exponent in zip(nodes, exponents, strict=True)}
    total = sum(2.0**exponent for exponent in exponents)
    keys = keys_of(4_000)
    first = [rank(key, nodes, classes)[0] for key in keys]

    for node, exponent in zip(nodes, exponents, strict=True):
        share = 2.0**exponent / total
        deviation = math.sqrt(len(keys) * share * (1 - share))
        assert abs(first.count(node) - len(keys) * share) < 4 * deviation


@given(seed=st.integers(0, 2**32), change=st.integers(-FLOOR_CLASSES, MAX_CLASSES_ABOVE).filter(bool))
@settings(max_examples=25, deadline=None)
def test_a_change_of_one_class_moves_keys_to_or_from_that_node_alone(seed: int, change: int) -> None:
    """All other pairs of nodes keep their order, and a faster node loses no key."""
    nodes = ids(9, seed)
    classes = dict.fromkeys(nodes, 9) | {nodes[1]: 8, nodes[2]: 10}
    changed = nodes[-1]
    for key in keys_of(30):
        before = rank(key, nodes, classes)
        after = rank(key, nodes, classes | {changed: 9 + change})
        without = [node for node in before if node != changed]
        assert [node for node in after if node != changed] == without
        if before[0] != after[0]:
            assert (after if change > 0 else before)[0] == changed


def test_a_node_under_the_floor_is_no_candidate_unless_too_few_others_are() -> None:
    """It owns and backs up nothing beside two others; beside one it comes last; alone among its like it is as good."""
    fast, other, slow, slower = ids(4, 5)
    classes = {fast: 12, other: 12, slow: 12 - FLOOR_CLASSES, slower: 1}
    for key in keys_of(50):
        assert set(rank(key, [fast, other, slow], classes)) == {fast, other}
        assert rank(key, [slow, fast], classes) == [fast, slow]
        assert rank(key, [slow, fast, slower], classes | {slow: 12})[-1] != slower
        assert set(rank(key, [slow, slower], classes | {slow: 1})) == {slow, slower}


def test_a_node_far_above_the_median_counts_as_eight_times_it() -> None:
    """Its share does not grow beyond that, because its memory does not."""
    nodes = ids(5, 6)
    classes = dict.fromkeys(nodes, 5)

    for key in keys_of(200):
        assert rank(key, nodes, classes | {nodes[0]: 14}) == rank(key, nodes, classes | {nodes[0]: 8})
