"""The iterative lookup: window, slow peers, termination."""

from __future__ import annotations

import random

import pytest
from kademlia.node import Node

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.ids import distance, random_id
from p2pnode.overlay.kademlia.lookup import Lookup
from p2pnode.overlay.kademlia.routing_table import ContactTable
from p2pnode.overlay.peers import Contact
from tests.harness.builders.peers import contact, ids


def test_a_lookup_ends_with_the_k_closest_that_answered() -> None:
    """Failed candidates are left out, slow ones free their place in the window, the own node takes part."""
    own, *others = ids(30, seed=5)
    target = others[0]
    ranked = sorted([own, *others], key=lambda node_id: distance(node_id, target))
    dead = {ranked[1], ranked[4]}
    lookup = Lookup(target, contact(own), 5, 3, [contact(ranked[-1])])
    while not lookup.done:
        asked = lookup.next_queries()
        assert asked
        for peer in asked:
            if peer.node_id in dead:
                lookup.on_slow(peer.node_id)
                lookup.on_failure(peer.node_id)
            else:
                lookup.on_response(peer.node_id, [contact(other) for other in others])

    assert [c.node_id for c in lookup.result()] == [n for n in ranked if n not in dead][:5]


def test_the_node_that_is_looked_up_is_asked_once_more() -> None:
    """Of the k closest, the target alone gets a second request when it has failed; the lookup ends when that fails."""
    own, *others = ids(10, seed=8)
    target, neighbour = sorted(others, key=lambda node_id: distance(node_id, others[0]))[:2]
    assert target == others[0]
    for answers in (True, False):
        lookup = Lookup(target, contact(own), 20, 9, [contact(node_id) for node_id in others])
        asked = [peer.node_id for peer in lookup.next_queries()]
        assert sorted(asked) == sorted(others)
        for node_id in reversed(asked):
            if node_id in (target, neighbour):
                lookup.on_slow(node_id)
                lookup.on_failure(node_id)
            else:
                lookup.on_response(node_id, [])
        assert not lookup.done
        assert [peer.node_id for peer in lookup.next_queries()] == [target]
        assert lookup.queries == len(others) + 1
        if answers:
            lookup.on_response(target, [])
        else:
            lookup.on_failure(target)
        assert lookup.next_queries() == []
        assert lookup.done
        found = [peer.node_id for peer in lookup.result()]
        assert (target in found, neighbour in found, len(found)) == (answers, False, 8 + answers)


def test_a_slow_peer_frees_its_place() -> None:
    """With a window of 3 and three silent peers, three more are asked."""
    own, *others = ids(10, seed=6)
    lookup = Lookup(own, contact(own), 8, 3, [contact(node_id) for node_id in others])
    first = lookup.next_queries()
    assert len(first) == 3
    assert lookup.next_queries() == []
    for peer in first:
        lookup.on_slow(peer.node_id)
    assert len(lookup.next_queries()) == 3
    assert not lookup.done


def test_a_lookup_asks_all_the_closest_at_once_when_no_answer_brings_a_closer_node() -> None:
    """While answers bring closer nodes the window is 3; after one that brings none, the 8 closest are asked."""
    own, *others = ids(30, seed=7)
    target = random_id(random.Random(7))
    ranked = sorted(others, key=lambda node_id: distance(node_id, target))
    lookup = Lookup(target, contact(own), 8, 3, [contact(node_id) for node_id in ranked[10:14]])
    first = lookup.next_queries()
    assert len(first) == 3
    lookup.on_response(first[0].node_id, [contact(node_id) for node_id in ranked[:10]])
    assert len(lookup.next_queries()) == 1, "it brought closer ones: the window stays"
    lookup.on_response(first[1].node_id, [contact(node_id) for node_id in ranked[:10]])
    assert len(lookup.next_queries()) >= 6, "nothing new: the rest is asked at once"
    assert lookup.rounds == 2


def test_the_replacement_of_a_slow_peer_is_asked_before_it_has_failed() -> None:
    """All of the 5 closest are silent: the next 5 are asked while the lookup still waits for those."""
    own, *others = ids(20, seed=8)
    target = random_id(random.Random(8))
    ranked = sorted(others, key=lambda node_id: distance(node_id, target))
    lookup = Lookup(target, contact(own), 5, 5, [contact(node_id) for node_id in others])
    for peer in lookup.next_queries():
        lookup.on_slow(peer.node_id)
    assert {peer.node_id for peer in lookup.next_queries()} <= set(ranked[4:10])
    assert not lookup.done


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
    gone = [entry.node_id for entry in rng.sample(list(table), len(table) // 4)]
    for node_id in gone:
        table.remove(node_id)
    members = [entry.node_id for entry in table]
    assert not set(gone) & set(members)
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
