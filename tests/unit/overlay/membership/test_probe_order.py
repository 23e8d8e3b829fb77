"""The order of probes."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import Counter

from p2pnode.overlay.ids import distance
from p2pnode.overlay.membership.probe_order import NEIGHBOURS, ProbeOrder
from tests.harness.builders.peers import ids

OWN = bytes(20)


def order_of(members: list[bytes]) -> ProbeOrder:
    order = ProbeOrder(OWN, random.Random(1))
    for node_id in members:
        order.insert(node_id)
    return order


def test_each_pass_contains_every_member_once_in_a_new_order() -> None:
    """Three passes over eight members: all of them each time, and not always in the same order."""
    members = ids(8)
    order = order_of(members)
    passes = [[order.next_due(members, lambda _: True) for _ in members] for _ in range(3)]

    assert all(sorted(each) == sorted([node_id] for node_id in members) for each in passes)
    assert len({str(each) for each in passes}) > 1


def test_members_that_are_not_due_are_skipped() -> None:
    """The next due one is found beyond them; when none is due, there is none."""
    members = ids(5)
    order = order_of(members)

    assert order.next_due(members, lambda node_id: node_id == members[3]) == [members[3]]
    assert order.next_due(members, lambda _: False) == []


def test_a_new_member_is_probed_within_the_present_pass() -> None:
    """It gets a place behind the present position."""
    members = ids(9)
    order = order_of(members[:8])
    for _ in range(4):
        order.next_due(members[:8], lambda _: True)
    order.insert(members[8])
    rest = [order.next_due(members, lambda _: True) for _ in range(5)]

    assert [members[8]] in rest


def test_an_empty_order_has_no_next() -> None:
    """Without members, and after all were removed."""
    order = order_of(ids(2))

    assert ProbeOrder(OWN, random.Random(1)).next_due([], lambda _: True) == []
    assert [order.next_due([], lambda _: False) for _ in range(3)] == [[], [], []]


def test_among_many_the_closest_have_turns_of_their_own() -> None:
    """Of two hundred each of the twenty closest is probed once in twenty rounds at least, and the others in turn as
    before; with forty members one a round is enough."""
    members = ids(200)
    order = order_of(members)
    near = set(sorted(members, key=lambda node_id: distance(node_id, OWN))[:NEIGHBOURS])
    rounds = [order.next_due(members, lambda _: True) for _ in range(len(members))]

    assert {len(each) for each in rounds} == {2}
    assert sorted(each[0] for each in rounds) == sorted(members)
    for first in range(0, len(members), NEIGHBOURS):
        assert {each[1] for each in rounds[first : first + NEIGHBOURS]} == near
    few = members[: 2 * NEIGHBOURS]
    order = order_of(few)
    assert {len(order.next_due(few, lambda _: True)) for _ in range(100)} == {1}


def test_a_new_member_among_the_closest_is_probed_within_their_present_pass() -> None:
    """It is closer than the farthest of them when their turns began; one that is farther waits for its own turn."""
    *members, far = sorted(ids(201), key=lambda node_id: distance(node_id, OWN))
    new = members.pop(3)
    order = order_of(members)
    seen = [order.next_due(members, lambda _: True)[1] for _ in range(5)]
    order.insert(new)
    order.insert(far)
    everybody = [*members, new, far]
    seen += [order.next_due(everybody, lambda _: True)[1] for _ in range(NEIGHBOURS - 5 + 1)]

    assert Counter(seen) == Counter([*members[:NEIGHBOURS], new])
    seen = [order.next_due(everybody, lambda _: True)[1] for _ in range(NEIGHBOURS)]
    assert set(seen) == {*members[: NEIGHBOURS - 1], new}, "there are as many as before"
    left = [node_id for node_id in everybody if node_id not in members[:2]]
    seen = [order.next_due(left, lambda node_id: node_id in left)[1] for _ in range(2 * NEIGHBOURS)]
    assert not set(seen) & set(members[:2]), "removed ones are never due"


def rounds_until_probed(joined: bytes, others: list[bytes], rng: random.Random) -> int:
    """`others` by distance: the closest know the node from now on, and are anywhere in their turns."""
    orders = []
    for own in others[:NEIGHBOURS]:
        members = [*others[:NEIGHBOURS], *rng.sample(others[NEIGHBOURS:], 380)]
        order = ProbeOrder(own, rng)
        for node_id in members:
            order.insert(node_id)
        for _ in range(rng.randrange(NEIGHBOURS)):
            order.next_due(members, lambda _: True)
        order.insert(joined)
        orders.append((order, [*members, joined]))
    for rounds in itertools.count(1):
        if any(joined in order.next_due(members, lambda _: True) for order, members in orders):
            return rounds
    raise AssertionError


def test_a_node_that_only_the_closest_know_is_probed_soon() -> None:
    """Of a thousand nodes those twenty know it that are closest, each among four hundred. One of them probes
    it in the first rounds. (It was: in the tenth at the median.)"""
    rng = random.Random(7)
    everybody = ids(1000)
    waited = []
    for joined in rng.sample(everybody, 15):
        others = sorted(everybody, key=lambda node_id: distance(node_id, joined))[1:]
        waited.append(rounds_until_probed(joined, others, rng))
    print(sorted(waited))
    assert statistics.median(waited) <= 2
    assert max(waited) <= 5
