"""The order of probes."""

from __future__ import annotations

import random

from overlay.membership.probe_order import ProbeOrder
from tests.harness.builders.peers import ids


def order_of(members: list[bytes]) -> ProbeOrder:
    order = ProbeOrder(random.Random(1))
    for node_id in members:
        order.insert(node_id)
    return order


def test_each_pass_contains_every_member_once_in_a_new_order() -> None:
    """Three passes over eight members: all of them each time, and not always in the same order."""
    members = ids(8)
    order = order_of(members)
    passes = [[order.next_due(members, lambda _: True) for _ in members] for _ in range(3)]

    assert all(sorted(each) == sorted(members) for each in passes)  # type: ignore[type-var]
    assert len({tuple(each) for each in passes}) > 1


def test_members_that_are_not_due_are_skipped() -> None:
    """The next due one is found beyond them; when none is due, there is none."""
    members = ids(5)
    order = order_of(members)

    assert order.next_due(members, lambda node_id: node_id == members[3]) == members[3]
    assert order.next_due(members, lambda _: False) is None


def test_a_new_member_is_probed_within_the_present_pass() -> None:
    """It gets a place behind the present position."""
    members = ids(9)
    order = order_of(members[:8])
    for _ in range(4):
        order.next_due(members[:8], lambda _: True)
    order.insert(members[8])
    rest = [order.next_due(members, lambda _: True) for _ in range(5)]

    assert members[8] in rest


def test_an_empty_order_has_no_next() -> None:
    """Without members, and after all were removed."""
    order = order_of(ids(2))

    assert ProbeOrder(random.Random(1)).next_due([], lambda _: True) is None
    assert [order.next_due([], lambda _: False) for _ in range(3)] == [None, None, None]
