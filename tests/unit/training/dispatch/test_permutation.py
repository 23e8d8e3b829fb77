"""The order of a pass: every task once, and each place for each task equally often."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from training.dispatch.permutation import PassOrder


@pytest.mark.parametrize("tasks", [1, 2, 3, 5, 16, 17, 1000, 1025])
def test_every_task_comes_once(tasks: int) -> None:
    """For any number of tasks, shuffled or not."""
    for pass_number in range(3):
        order = PassOrder(tasks, 11, pass_number, shuffle=True)
        assert sorted(order(place) for place in range(tasks)) == list(range(tasks))
    order = PassOrder(tasks, 11, 1, shuffle=False)
    assert [order(place) for place in range(tasks)] == list(range(tasks))
    for place in (-1, tasks):
        with pytest.raises(IndexError):
            order(place)


def test_each_task_is_equally_often_at_each_place() -> None:
    """Over 8,000 passes of seven tasks each of the 49 pairs comes up within an eighth of its share, and all orders of
    four tasks do."""
    seen: Counter[tuple[int, int]] = Counter()
    orders: Counter[tuple[int, ...]] = Counter()
    for pass_number in range(8_000):
        order = PassOrder(7, 5, pass_number, shuffle=True)
        seen.update((place, order(place)) for place in range(7))
        if pass_number < 5_000:
            four = PassOrder(4, 5, pass_number, shuffle=True)
            orders[tuple(four(place) for place in range(4))] += 1
    share = 8_000 / 7
    assert all(0.875 * share < count < 1.125 * share for count in seen.values())
    assert len(seen) == 49
    assert len(orders) == 24
    assert min(orders.values()) > 5_000 / 24 / 2


def test_neighbours_are_torn_apart() -> None:
    """In a shuffled pass of 10,000 tasks hardly any task is followed by its successor."""
    order = PassOrder(10_000, 1, 1, shuffle=True)
    places = [order(place) for place in range(10_000)]
    assert sum(after == before + 1 for before, after in pairwise(places)) < 10
