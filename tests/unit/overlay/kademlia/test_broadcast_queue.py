"""The queue of gossip that rides on datagrams."""

from __future__ import annotations

from p2pnode.overlay.kademlia import messages
from p2pnode.overlay.kademlia.messages import GOSSIP_PER_DATAGRAM, MAX_QUEUED, BroadcastQueue
from tests.harness.builders.peers import ids


def test_an_update_is_sent_a_bounded_number_of_times() -> None:
    """4 · ceil(log10(n + 1)) datagrams each, four updates per datagram, only the newest about a node."""
    queue = BroadcastQueue()
    nodes = ids(6)
    for node_id in nodes:
        queue.put(messages.Gossip(1, node_id, 1), members=99)
    queue.put(messages.Gossip(2, nodes[0], 1), members=99)
    told: list[messages.Gossip] = []
    while taken := queue.take():
        assert len(taken) <= GOSSIP_PER_DATAGRAM
        told += taken

    assert len(told) == 6 * 8
    assert messages.Gossip(1, nodes[0], 1) not in told


def test_a_full_queue_drops_the_oldest() -> None:
    """In a mass failure the queue stays bounded."""
    queue = BroadcastQueue()
    nodes = ids(MAX_QUEUED + 1, seed=3)
    for node_id in nodes:
        queue.put(messages.Gossip(2, node_id, 1), members=9)

    assert len(queue) == MAX_QUEUED
    assert queue.take()[0].node_id == nodes[1]


def test_an_empty_queue_has_nothing_to_take() -> None:
    """A datagram without gossip is the rule."""
    assert BroadcastQueue().take() == []
