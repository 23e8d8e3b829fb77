"""Draws of peers: uniform through the real pool, where the closest node to a random id is not."""

from __future__ import annotations

import random

import pytest

from p2pnode.overlay.discovery.sampling import SLOTS, SamplePool, ball_radius, inside_ball, is_kept
from p2pnode.overlay.ids import distance, random_id
from tests.harness.builders.peers import ids
from tests.harness.swarms.overlay_draws import draw_naively, draw_with_truth, judge


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
    kept = [sum(is_kept(size, SLOTS, rng) for _ in range(4000)) / 4000 for size in (0, 5, 10, 20)]

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


def test_ball_rejection_is_uniform_and_the_closest_node_is_not() -> None:
    """Chi-square over 60 nodes: kept XOR balls pass, "closest to a random id" fails; so the test has power."""
    rng = random.Random(9)
    nodes = ids(60, seed=10)
    radius = ball_radius(60)
    uniform, naive = dict.fromkeys(nodes, 0), dict.fromkeys(nodes, 0)
    draws = tries = 0
    while draws < 3000:
        target = random_id(rng)
        tries += 1
        inside = sorted(inside_ball(target, nodes, radius), key=lambda n: distance(n, target))[:SLOTS]
        naive[min(nodes, key=lambda n: distance(n, target))] += 1
        if is_kept(len(inside), SLOTS, rng):
            uniform[rng.choice(inside)] += 1
            draws += 1

    def chi_square(counts: dict[bytes, int]) -> float:
        mean = sum(counts.values()) / len(counts)
        return sum((count - mean) ** 2 / mean for count in counts.values())

    # 59 degrees of freedom: 98.3 is the 0.999 quantile.
    assert chi_square(uniform) < 98.3
    assert chi_square(naive) > 500
    assert draws / tries == pytest.approx(0.5, abs=0.02)


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
