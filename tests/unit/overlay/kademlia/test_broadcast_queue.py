"""The queue of gossip that rides on datagrams."""

from __future__ import annotations

from overlay.kademlia import messages
from overlay.kademlia.broadcast_queue import GOSSIP_PER_DATAGRAM, BroadcastQueue
from tests.harness.peers import ids


def test_news_are_told_a_bounded_number_of_times() -> None:
    """4 · ceil(log10(n + 1)) datagrams each, four at a time, newest about a node only."""
    queue = BroadcastQueue()
    nodes = ids(6)
    for node_id in nodes:
        queue.put(messages.Gossip(1, node_id, 1, 0), members=99)
    queue.put(messages.Gossip(2, nodes[0], 1, 0), members=99)
    told: list[messages.Gossip] = []
    while taken := queue.take():
        assert len(taken) <= GOSSIP_PER_DATAGRAM
        told += taken

    assert len(told) == 6 * 8
    assert messages.Gossip(1, nodes[0], 1, 0) not in told
