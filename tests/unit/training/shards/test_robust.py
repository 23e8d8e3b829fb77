"""Clipping, as a pure rule."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from p2pnode.training.shards.robust import (
    CLIP_MULTIPLE,
    MAX_NORM_AGE_STEPS,
    MAX_NORMS,
    FirstNorms,
    Norms,
    clip_factor,
    is_unusual,
    norm_of,
)

SEED = 7


def member(number: int) -> bytes:
    return bytes([number]) * 20


# -- lengths ----------------------------------------------------------------------------------------------------------


def test_a_length_is_exact_where_float32_squares_overflow() -> None:
    """Squares overflow at 1e19; such a length is still finite, and that of NaN is not."""
    assert norm_of(np.array([3.0, 4.0], np.float32)) == 5.0
    assert norm_of(np.full(4, 1e30, np.float32)) == pytest.approx(2e30)
    assert norm_of(np.array([1e-30, 0.0], np.float32)) < 1e-6
    assert not math.isfinite(norm_of(np.array([1.0, np.nan], np.float32)))
    assert not math.isfinite(norm_of(np.array([1.0, np.inf], np.float32)))


def test_norms_are_the_same_in_any_order() -> None:
    """Owner and backup note lengths in different orders, and have the same median."""
    print(f"seed {SEED}")
    rows = [(member(node), 1, step, float(node + step)) for node in range(1, 9) for step in range(1, 6)]
    tables = []
    for turn in range(4):
        random.Random(SEED + turn).shuffle(rows)
        norms = Norms()
        for row in rows:
            norms.note(*row)
        tables.append((sorted(norms.rows()), norms.copy().reference()))

    assert tables[0] == (sorted((member(node), 1, 5, node + 5.0) for node in range(1, 9)), 9.0)
    assert all(table == tables[0] for table in tables)


def test_one_member_has_one_vote() -> None:
    """However often and long it sends, the median stays with the others."""
    norms = Norms()
    for node in range(1, 4):
        norms.note(member(node), 1, 1, 1.0)
    for step in range(2, 200):
        norms.note(member(9), 1, step, 1000.0)

    assert norms.copy().reference() == 1.0


def test_the_median_follows_when_all_deltas_grow() -> None:
    """Lengths are noted before clipping: a median of clipped lengths could only fall."""
    norms = Norms()
    for step in range(1, 10):
        for node in range(1, 9):
            norms.note(member(node), 1, step, 2.0**step)

    assert norms.copy().reference() == 2.0**9


def test_norms_of_long_ago_do_not_count() -> None:
    """Deltas shrink during training: members that stopped long ago do not keep the median high."""
    norms = Norms()
    for node in range(1, 5):
        norms.note(member(node), 1, 1, 100.0)
    for node in range(5, 10):
        norms.note(member(node), 1, MAX_NORM_AGE_STEPS + 2, 1.0)

    assert norms.copy().reference() == 1.0


def test_a_shard_without_gradient_has_no_reference() -> None:
    """Deltas of zeros are not noted: the first other one is not clipped to nothing."""
    norms = Norms()
    for node in range(1, 5):
        norms.note(member(node), 1, 1, 0.0)

    assert (len(norms), norms.reference()) == (0, None)
    assert clip_factor(3.0, 0.0) == 1.0


def test_the_table_of_norms_is_bounded() -> None:
    """With too many members the one that was noted longest ago goes."""
    norms = Norms()
    for number in range(MAX_NORMS + 10):
        norms.note(number.to_bytes(20, "big"), 1, number, 1.0)

    assert len(norms) == MAX_NORMS
    assert min(step for _, _, step, _ in norms.rows()) == 10

    norms.note((10).to_bytes(20, "big"), 1, 99, 1.0)
    norms.note(member(200), 1, 99, 1.0)
    assert min(step for _, _, step, _ in norms.rows()) == 12


@pytest.mark.parametrize(("norm", "factor"), [(0.5, 1.0), (1.0, 1.0), (4.0, 0.25), (1000.0, 0.001)])
def test_a_long_delta_is_shortened_to_the_median(norm: float, factor: float) -> None:
    """A shorter one is unchanged."""
    assert clip_factor(norm, 1.0) == pytest.approx(factor)
    assert min(norm, CLIP_MULTIPLE) == pytest.approx(norm * clip_factor(norm, 1.0))


def test_unusual_needs_a_majority() -> None:
    """Five times the median of three members is unusual; of two, either could be."""
    assert is_unusual(5.1, 1.0, 3)
    assert not is_unusual(4.9, 1.0, 3)
    assert not is_unusual(99.0, 1.0, 2)
    assert not is_unusual(99.0, None, 9)


def test_nothing_is_accepted_before_three_lengths_are_known() -> None:
    """The first member, with a delta a thousand times too long, is compared with the others."""
    first = FirstNorms()

    assert first.reference(0, member(9), 1000.0, 8.0) is None
    assert first.reference(0, member(9), 1000.0, 8.0) is None
    assert first.reference(0, member(1), 1.0, 8.0) is None
    assert first.reference(0, member(2), 1.2, 8.0) == 1.2
    assert first.reference(0, member(9), 1000.0, 8.0) == 1.2
    assert first.reference(1, member(1), 1.0, 1.0) == 1.0  # a member alone waits for no other
