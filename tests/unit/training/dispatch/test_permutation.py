"""The order of an epoch, computed place by place."""

from __future__ import annotations

from collections import Counter

import pytest

from p2pnode.training.dispatch.permutation import EpochOrder


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 65, 1000, 4097])
def test_every_sample_has_one_place(size: int) -> None:
    """The places of any pieces together hold each sample once."""
    order = EpochOrder(size, 3, 1)

    found = [sample for start in range(0, size, 7) for sample in order.samples(start, min(size, start + 7))]

    assert sorted(found) == list(range(size))


def test_seed_and_epoch_change_the_order() -> None:
    """The same seed and epoch give the same order; another of either gives another."""
    orders = [EpochOrder(1000, seed, epoch).samples(0, 1000) for seed, epoch in [(1, 1), (1, 1), (1, 2), (2, 1)]]

    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) == 3


def test_a_large_data_set_needs_no_list() -> None:
    """A piece of 10¹² samples is computed alone."""
    samples = EpochOrder(10**12, 1, 1).samples(10**11, 10**11 + 50)

    assert len(set(samples)) == 50
    assert max(samples) < 10**12


def test_each_record_is_equally_often_at_each_place() -> None:
    """Over 8,000 orders of seven records each of the 49 pairs comes up within an eighth of its share, and all orders of
    four records do."""
    seen = Counter(pair for seed in range(8_000) for pair in enumerate(EpochOrder(7, 5, seed).samples(0, 7)))
    orders = Counter(tuple(EpochOrder(4, 5, seed).samples(0, 4)) for seed in range(5_000))
    assert all(7 / 8 < 7 * count / 8_000 < 9 / 8 for count in seen.values())
    assert (len(seen), len(orders)) == (49, 24)
    assert min(orders.values()) > 5_000 / 24 / 2
