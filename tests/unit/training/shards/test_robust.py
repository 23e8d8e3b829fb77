"""Clipping, windows and the trimmed mean, as pure rules."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from training.shards.applied import DeltaId
from training.shards.outer_rule import Rule
from training.shards.robust import (
    CLIP_MULTIPLE,
    MAX_MEMBERS,
    MAX_NORM_AGE_STEPS,
    MAX_NORMS,
    FirstNorms,
    Norms,
    clip_factor,
    is_complete,
    is_unusual,
    norm_of,
    trimmed,
    trimmed_sum,
)
from training.shards.state import ShardState

SEED = 7
TRIMMED = Rule(outer_lr=1.0, outer_momentum=0.0, robust="trimmed-mean")


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
    """With too many members the one with the oldest step goes."""
    norms = Norms()
    for number in range(MAX_NORMS + 10):
        norms.note(number.to_bytes(20, "big"), 1, number, 1.0)

    assert len(norms) == MAX_NORMS
    assert min(step for _, _, step, _ in norms.rows()) == 10


@pytest.mark.parametrize("members", [MAX_NORMS - 1, MAX_NORMS + 1, 5 * MAX_NORMS])
def test_the_row_that_goes_is_the_lowest_of_all(members: int) -> None:
    """Whatever came before: steps that go back with a new start, members that go and come again."""
    print(f"seed {SEED}")
    chance, norms, expected = random.Random(SEED), Norms(), dict[bytes, tuple[int, int, float]]()
    for turn in range(20 * MAX_NORMS):
        node = chance.randrange(members).to_bytes(20, "big")
        incarnation = 1 + (turn > 500 and chance.random() < 0.1)
        row = incarnation, chance.randrange(turn // 50, turn // 50 + 4), 1.0 + turn
        norms.note(node, *row)
        if node not in expected and len(expected) == MAX_NORMS:
            del expected[min((step, other) for other, (_, step, _) in expected.items())[1]]
        if node not in expected or row[:2] >= expected[node][:2]:
            expected[node] = row
        assert norms.rows() == [(other, *values) for other, values in expected.items()]
    for turn in range(10 * MAX_NORMS):
        norms.note(node, 3, turn, 1.0)
    assert norms._oldest is None or len(norms._oldest) <= 4 * MAX_NORMS


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


# -- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "deltas", "workers", "complete"),
    [
        (0, 0, 8, False),
        (1, 1, 1, True),  # alone, or two: nothing to trim, nothing to wait for
        (1, 1, 2, True),
        (1, 1, 3, False),
        (1, 4, 3, False),  # one member, however often
        (3, 3, 3, True),
        (7, 7, 8, False),
        (8, 8, 8, True),
        (4, 5, 8, True),  # half, and one of them again
        (3, 9, 8, False),
        (3, 4, 4, True),
        (MAX_MEMBERS, MAX_MEMBERS, 500, True),
    ],
)
def test_when_a_window_is_complete(members: int, deltas: int, workers: float, complete: bool) -> None:
    """By the number of members in it, never by their claimed weights."""
    assert is_complete(members, deltas, workers) is complete


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 10, 16, 31])
def test_the_trimmed_sum_is_that_of_sorting(count: int) -> None:
    """Per coordinate equal to sorting, dropping the ends, and scaling up; over several blocks, in any order of rows."""
    print(f"seed {SEED}")
    rows = [np.random.default_rng(SEED + row).normal(size=70_000).astype(np.float32) for row in range(count)]
    drop = trimmed(count)
    kept = np.sort(np.stack(rows).astype(np.float64), axis=0)[drop : count - drop]
    expected = kept.sum(axis=0) * count / (count - 2 * drop)
    out = np.empty(70_000, np.float32)

    trimmed_sum(rows, out)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)
    trimmed_sum(rows[::-1], out)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


def test_equal_rows_add_up() -> None:
    """Without an outlier trimming removes nothing: n equal rows are n times one."""
    out = np.empty(5, np.float32)
    trimmed_sum([np.full(5, 0.125, np.float32)] * 8, out)

    assert out.tolist() == [1.0] * 5


def test_no_single_row_decides_the_sum() -> None:
    """Whatever one of eight sends, even infinity, the result is between the others' extremes times 8."""
    honest = [np.array([0.9 + 0.025 * row], np.float32) for row in range(7)]
    for lie in (1e38, -1e38, -10.0, 0.0):
        out = np.empty(1, np.float32)
        trimmed_sum([*honest, np.array([lie], np.float32)], out)
        assert 8 * 0.9 <= out[0] <= 8 * 1.06


def test_a_window_counts_a_member_once() -> None:
    """Three deltas of one member are one row, which does not outvote two others."""
    state = ShardState(value=np.zeros(2, np.float32), parameters=2)
    window = [DeltaId(member(9), 1, step) for step in (1, 2, 3)] + [DeltaId(member(node), 1, 1) for node in (1, 2, 3)]
    for identity in window:
        amount = -10.0 if identity.node == member(9) else 1.0
        state.add_pending(identity, 0.5, np.full(2, amount, np.float32))

    assert state.close(window, TRIMMED)
    assert state.value.tolist() == [2.0, 2.0]  # four rows: 0.5, 0.5, 0.5, −15; the middle two, times two
    assert (state.version, state.pending, state.known_count) == (6, {}, 6)
    assert all(state.knows(identity) for identity in window)


def test_a_window_is_closed_once_and_only_completely() -> None:
    """A repetition changes nothing; with a missing delta nothing is done, and the answer is False."""
    state = ShardState(value=np.zeros(1, np.float32), parameters=1)
    here, there = DeltaId(member(1), 1, 1), DeltaId(member(2), 1, 1)
    state.add_pending(here, 1.0, np.ones(1, np.float32))

    assert not state.close([here, there], TRIMMED)
    assert (state.value.tolist(), state.version) == ([0.0], 0)
    assert state.close([here], TRIMMED)
    assert state.close([here], TRIMMED)
    assert (state.value.tolist(), state.version) == ([1.0], 1)


def test_a_window_of_whole_weight_is_one_momentum_step() -> None:
    """As if its deltas were added one by one."""
    rule = Rule(outer_lr=0.5, outer_momentum=0.5, robust="trimmed-mean")
    held = ShardState(value=np.zeros(1, np.float32), parameters=1)
    plain = ShardState(value=np.zeros(1, np.float32), parameters=1)
    for turn in range(2):
        window = [DeltaId(member(node), 1, turn) for node in range(4)]
        for identity in window:
            held.add_pending(identity, 0.25, np.ones(1, np.float32))
            plain.apply(identity, 0.25, np.ones(1, np.float32), rule)
        assert held.close(window, rule)

    np.testing.assert_allclose(held.value, plain.value, rtol=1e-6)
    np.testing.assert_allclose(held.momentum, plain.momentum, rtol=1e-6)
