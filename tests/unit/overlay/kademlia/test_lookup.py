"""The iterative lookup: window, slow peers, termination."""

from __future__ import annotations

import random

from p2pnode.overlay.ids import distance, random_id
from p2pnode.overlay.kademlia.lookup import Lookup
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
