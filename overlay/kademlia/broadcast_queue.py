"""News that ride on datagrams: a queue that gives each piece to a bounded number of datagrams.

SWIM's dissemination: the least told first, each told `RETRANSMIT · ceil(log10(n + 1))` times (memberlist), a newer
piece about a node replaces the older. Pure.
"""

from __future__ import annotations

import math

from overlay.kademlia.messages import Gossip

RETRANSMIT = 4
#: News per datagram; four cost about 120 bytes.
GOSSIP_PER_DATAGRAM = 4
#: Beyond this the oldest is dropped: in a mass failure probes find out by themselves.
MAX_QUEUED = 512


class BroadcastQueue:
    """What this node still has to tell."""

    def __init__(self) -> None:
        self._left: dict[bytes, tuple[int, Gossip]] = {}

    def __len__(self) -> int:
        return len(self._left)

    def put(self, news: Gossip, members: int) -> None:
        """Tell this; it replaces what was queued about the same node."""
        times = RETRANSMIT * max(1, math.ceil(math.log10(members + 1)))
        self._left.pop(news.node_id, None)
        self._left[news.node_id] = (times, news)
        if len(self._left) > MAX_QUEUED:
            del self._left[next(iter(self._left))]

    def take(self) -> list[Gossip]:
        """What the next datagram carries; each piece goes to the end of the queue, or out of it."""
        if not self._left:
            return []
        taken: list[Gossip] = []
        for node_id in list(self._left)[:GOSSIP_PER_DATAGRAM]:
            times, news = self._left.pop(node_id)
            taken.append(news)
            if times > 1:
                self._left[node_id] = (times - 1, news)
        return taken
