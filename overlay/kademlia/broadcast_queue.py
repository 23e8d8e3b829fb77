"""Gossip that rides on datagrams: a queue that gives each update to a bounded number of datagrams.

SWIM's dissemination: the least sent update first, each sent `RETRANSMIT · ceil(log10(n + 1))` times as in memberlist; a
newer update about a node replaces the older. Pure.
"""

from __future__ import annotations

import math
from itertools import islice

from p2pnode.overlay.kademlia.messages import Gossip

RETRANSMIT = 4
#: Updates per datagram; four cost about 120 bytes.
GOSSIP_PER_DATAGRAM = 4
#: Beyond this the oldest is dropped: in a mass failure probes find the dead without gossip.
MAX_QUEUED = 512


class BroadcastQueue:
    """The updates that this node still has to send."""

    def __init__(self) -> None:
        self._left: dict[bytes, tuple[int, Gossip]] = {}

    def __len__(self) -> int:
        return len(self._left)

    def put(self, news: Gossip, members: int) -> None:
        """Queue an update; it replaces what was queued about the same node."""
        times = RETRANSMIT * max(1, math.ceil(math.log10(members + 1)))
        self._left.pop(news.node_id, None)
        self._left[news.node_id] = (times, news)
        if len(self._left) > MAX_QUEUED:
            del self._left[next(iter(self._left))]

    def take(self) -> list[Gossip]:
        """The updates for the next datagram; each moves to the end of the queue, or out of it."""
        if not self._left:
            return []
        taken: list[Gossip] = []
        for node_id in list(islice(self._left, GOSSIP_PER_DATAGRAM)):
            times, news = self._left.pop(node_id)
            taken.append(news)
            if times > 1:
                self._left[node_id] = (times - 1, news)
        return taken
