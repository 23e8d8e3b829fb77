"""Rendezvous ranking of candidates, by the hash alone and by capacity."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pnode.overlay.capacity import FLOOR_CLASSES, MAX_CLASSES_ABOVE
from p2pnode.overlay.discovery.placement import _negative_log2, rank, weight
from p2pnode.overlay.ids import key_id
from tests.harness.builders.peers import ids


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
