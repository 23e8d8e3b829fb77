"""Capacity classes: powers of two of a rate, with hysteresis, and weights relative to the median."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from p2pnode.overlay.line.capacity import (
    AT_LEAST,
    CLASS_BYTES_PER_S,
    CONFIRMATIONS,
    FLOOR_CLASSES,
    MARGIN_OCTAVES,
    TOP_CLASS,
    CapacityClass,
    class_of,
    split,
    weight_exponents,
)


def test_a_class_is_a_power_of_two_of_the_rate() -> None:
    """Twice the rate is one class more; the slowest and the fastest have no further classes."""
    assert class_of(1.0) == class_of(CLASS_BYTES_PER_S * 0.99) == 1
    assert [class_of(CLASS_BYTES_PER_S * 2**number) for number in range(4)] == [2, 3, 4, 5]
    assert class_of(64 * 1024 * 1024) == TOP_CLASS
    assert class_of(64 * 1024 * 1024 - 1) == TOP_CLASS - 1
    assert class_of(1e12) == TOP_CLASS


def test_noise_about_the_edge_of_a_class_changes_nothing() -> None:
    """A rate that wavers by 15 % about the edge between two classes stays in the first one it had."""
    seed = 5
    print(f"seed {seed}")
    rng = random.Random(seed)
    edge = CLASS_BYTES_PER_S * 2**6
    announced = CapacityClass()
    seen = []
    for _ in range(500):
        announced.update(edge * rng.uniform(0.87, 1.15), is_exact=True)
        seen.append(announced.announced)

    assert len({value for value in seen if value}) == 1
    assert seen[CONFIRMATIONS + 5] != 0


def test_a_class_follows_a_rate_that_stays_away_and_not_one_outlier() -> None:
    """One round far off changes nothing, a second one does."""
    announced = CapacityClass()
    for _ in range(CONFIRMATIONS):
        assert announced.announced == 0
        announced.update(1e6, is_exact=True)
    assert announced.announced == class_of(1e6)

    announced.update(1e5, is_exact=True)
    announced.update(1e6, is_exact=True)
    announced.update(1e5, is_exact=True)
    assert announced.announced == class_of(1e6)
    announced.update(1e5, is_exact=True)
    assert announced.announced == class_of(1e5)


@given(octaves=st.floats(-0.9 * MARGIN_OCTAVES, 1 + 0.9 * MARGIN_OCTAVES))
def test_a_class_ends_a_quarter_of_an_octave_beyond_its_edges(octaves: float) -> None:
    """Within the margin a rate stays in its class however long it lasts."""
    announced = CapacityClass()
    for _ in range(CONFIRMATIONS):
        announced.update(CLASS_BYTES_PER_S * 2**6.5, is_exact=True)
    before = announced.announced
    for _ in range(10):
        announced.update(CLASS_BYTES_PER_S * 2 ** (6 + octaves), is_exact=True)

    assert announced.announced == before


def test_a_lower_bound_raises_a_class_and_never_lowers_it() -> None:
    """A line that is not full any more keeps its class; one that shows more than its class is announced as at least
    that; a full one as just that."""
    announced = CapacityClass()
    seen = []
    for rate, is_exact in ((1e6, False), (1e6, True), (1e5, False), (8e6, False), (4e6, False), (1e6, True)):
        for _ in range(CONFIRMATIONS):
            announced.update(rate, is_exact=is_exact)
        seen.append(split(announced.announced))

    slow, fast = class_of(1e6), class_of(8e6)
    assert seen == [(slow, True), (slow, False), (slow, False), (fast, True), (fast, True), (slow, False)]


def test_lower_bounds_are_one_class() -> None:
    """How busy the lines of fast nodes were does not decide between them; a full and slow one is under the floor."""
    a, b, c, d = b"a", b"b", b"c", b"d"

    assert weight_exponents({a: AT_LEAST + 8, b: AT_LEAST + 9, c: 4, d: 0}) == {a: 0, b: 0, c: None, d: 0}
    assert weight_exponents({a: AT_LEAST + 3, b: AT_LEAST + 9}) == {a: 0, b: 0}
    assert weight_exponents({a: 200, b: AT_LEAST, c: 7}) == {a: 0, b: 0, c: 0}
    assert split(AT_LEAST + TOP_CLASS) == (TOP_CLASS, True)


def test_weights_are_relative_to_the_median_and_unknown_classes_are_the_median() -> None:
    """A swarm of one class, or of none, has equal weights; a slow node is under the floor, a fast one is bounded."""
    a, b, c, d = b"a", b"b", b"c", b"d"

    assert weight_exponents({a: 0, b: 0}) == {a: 0, b: 0}
    assert weight_exponents({a: 3, b: 3, c: 0}) == {a: 0, b: 0, c: 0}
    assert weight_exponents({a: 9, b: 9, c: 7, d: 0}) == {a: 0, b: 0, c: -2, d: 0}
    assert weight_exponents({a: 9, b: 9, c: 9 - FLOOR_CLASSES, d: 14}) == {a: 0, b: 0, c: None, d: 3}
    assert weight_exponents({a: 9, b: 5}) == {a: 0, b: None}
    assert weight_exponents({}) == {}


def test_a_first_estimate_counts_at_once_and_is_corrected_as_any_other() -> None:
    """It replaces no class that is known, and no number that is no class counts; two rounds then change it."""
    announced = CapacityClass()
    assert not announced.begin(0)
    assert not announced.begin(AT_LEAST)
    assert not announced.begin(200)
    assert announced.begin(class_of(6e5))
    assert not announced.begin(class_of(8e6))
    assert announced.announced == class_of(6e5)

    announced.update(8e6, is_exact=False)
    assert announced.announced == class_of(6e5)
    announced.update(8e6, is_exact=False)
    assert split(announced.announced) == (class_of(8e6), True)
