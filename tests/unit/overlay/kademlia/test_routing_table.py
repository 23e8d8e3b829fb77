"""The routing table: exact neighbours, bounded buckets."""

from __future__ import annotations

import random

import pytest
from kademlia.node import Node

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.ids import distance, random_id
from p2pnode.overlay.kademlia.routing_table import ContactTable
from p2pnode.overlay.peers import Contact
from tests.harness.builders.peers import contact, ids


def test_the_table_gives_the_exact_closest_and_the_target_itself() -> None:
    """Among what it holds: sorted by distance, the target included, suspects left out."""
    own, *others = ids(400, seed=3)
    table = ContactTable(20, Node(own))
    for number, node_id in enumerate(others):
        table.add(contact(node_id, number + 1))
    held = [c.node_id for c in table]
    target = held[17]
    expected = sorted(held, key=lambda node_id: distance(node_id, target))[:20]

    assert [entry.node_id for entry in table.closest(target, 20)] == expected
    assert expected[0] == target
    table.list_to_others(target, False)
    assert target not in [entry.node_id for entry in table.closest(target, 20)]
    for node_id in held:
        table.remove(node_id)
    assert not set(held) & {c.node_id for c in table}
    assert all(len(bucket) <= 20 for bucket in table.buckets)


def test_the_table_holds_the_closest_neighbours() -> None:
    """The 20 nodes closest to the own id are always in it, and the own id never is."""
    own, *others = ids(2000, seed=4)
    table = ContactTable(20, Node(own))
    for node_id in others:
        table.add(contact(node_id))
    nearest = sorted(others, key=lambda node_id: distance(node_id, own))[:20]

    assert set(nearest) <= {c.node_id for c in table}
    assert not table.add(contact(own))
    assert own not in table


@pytest.mark.parametrize("size", [0, 3, 20, 60, 400])
def test_the_closest_are_exact_whatever_the_table_holds(size: int) -> None:
    """Against a plain sort, for random targets and members, with removed, unlisted and skipped ones."""
    rng = random.Random(size)
    table = ContactTable(20, Node(random_id(rng)))
    for number in range(size):
        table.add(Contact(random_id(rng), Address("10.0.0.1", 1000 + number)))
    for entry in rng.sample(list(table), len(table) // 4):
        table.remove(entry.node_id)
    members = [entry.node_id for entry in table]
    for node_id in members[::5]:
        table.list_to_others(node_id, False)
    listed = [node_id for index, node_id in enumerate(members) if index % 5]
    for _ in range(100):
        target = rng.choice([random_id(rng), *listed[:1]])
        skip = rng.choice([None, *listed])
        expected = sorted((node_id for node_id in listed if node_id != skip), key=lambda n: distance(n, target))[:26]
        assert [entry.node_id for entry in table.closest(target, 26, skip=skip)] == expected


def test_a_contact_that_moved_is_named_at_its_new_address_alone() -> None:
    """Also one that was suspected at the old one."""
    own, one, two = ids(3, seed=5)
    table = ContactTable(20, Node(own))
    for node_id in (one, two):
        table.add(contact(node_id, 1))
    table.list_to_others(two, False)
    for node_id in (one, two):
        table.add(contact(node_id, 2))

    assert {entry.node_id: entry.address.port for entry in table} == {one: 2, two: 2}
    assert {entry.node_id: entry.address.port for entry in table.closest(own, 20)} == {one: 2, two: 2}


def test_a_suspect_stays_unlisted_when_its_bucket_is_split() -> None:
    """As long as it is suspected no answer names it, however the table grows; then all that have a place are named."""
    own, suspect, *others = ids(60, seed=6)
    table = ContactTable(20, Node(own))
    for node_id in (suspect, *others[:10]):
        table.add(contact(node_id))
    table.list_to_others(suspect, False)
    before = len(table.buckets)
    for node_id in others[10:]:
        table.add(contact(node_id))

    assert len(table.buckets) > before
    assert suspect in table
    assert suspect not in [entry.node_id for entry in table.closest(suspect, 60)]
    table.list_to_others(suspect, True)
    held = {entry.node_id for entry in table}
    assert {entry.node_id for entry in table.closest(suspect, 60)} == held
