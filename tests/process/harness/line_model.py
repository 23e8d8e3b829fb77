"""A small Internet: cables with rates, bounded queues, delay, jitter and loss, and the packets under way in them. Pure.

A packet waits for those before it (`queue_bytes`, drop-tail, as a home router's buffer), leaves at the line's rate, and
arrives after the delay and a uniform part of the jitter. Later packets never overtake, unless `reorders`. Losses come
after the queue: a lost packet has used the line, as on a radio link. Times are given in seconds of any clock, and the
seed decides about loss and jitter, so the same calls have the same results.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from typing import Any

MBIT_BYTES = 1e6 / 8
QUEUE_BYTES = 1 << 20
#: The largest packet of these lines.
PACKET_BYTES = 1500


@dataclass(frozen=True, slots=True)
class Cable:
    """What joins a node to the rest. A rate of 0 is no limit. Delay, jitter and loss are those of each direction, so a
    packet between two nodes has those of both their cables. Raises `ValueError` for what no cable is."""

    up_mbit: float = 0.0
    down_mbit: float = 0.0
    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    queue_bytes: int = QUEUE_BYTES
    reorders: bool = False

    def __post_init__(self) -> None:
        numbers = (self.up_mbit, self.down_mbit, self.delay_s, self.jitter_s)
        if not all(0 <= number < float("inf") for number in numbers):
            raise ValueError(f"rates, delay and jitter are finite and not negative: {self}")
        if not 0 <= self.loss <= 1:
            raise ValueError(f"a share of packets is lost, between 0 and 1: {self}")
        if self.queue_bytes < PACKET_BYTES:
            raise ValueError(f"a queue has room for one packet of {PACKET_BYTES} bytes: {self}")


class Line:
    """One direction of a cable, and how many packets were offered to it, dropped from its queue, and lost behind it."""

    def __init__(self, cable: Cable, *, is_up: bool, seed: str) -> None:
        self._is_up = is_up
        self._random = random.Random(seed).random
        self._free_at = self._last_arrival = float("-inf")
        self.offered = self.offered_bytes = self.dropped = self.lost = 0
        self.change(cable)

    def change(self, cable: Cable) -> None:
        """From now on it is another cable. What has left the queue, or has its time to leave it, keeps that time."""
        mbit = cable.up_mbit if self._is_up else cable.down_mbit
        self._byte_s = 1 / (mbit * MBIT_BYTES) if mbit else 0.0
        self._longest_wait_s = cable.queue_bytes * self._byte_s
        self._delay_s, self._jitter_s, self._loss = cable.delay_s, cable.jitter_s, cable.loss
        self._keeps_order = not cable.reorders

    def offer(self, now: float, size: int) -> float | None:
        """When a packet of so many bytes that is sent now arrives at the other end; None where it does not."""
        self.offered += 1
        self.offered_bytes += size
        leaves_at = now
        if self._byte_s:
            leaves_at = max(now, self._free_at) + size * self._byte_s
            if leaves_at - now > self._longest_wait_s:
                self.dropped += 1
                return None
            self._free_at = leaves_at
        if self._loss and self._random() < self._loss:
            self.lost += 1
            return None
        arrives_at = leaves_at + self._delay_s
        if self._jitter_s:
            arrives_at += self._jitter_s * self._random()
        if self._keeps_order:
            arrives_at = self._last_arrival = max(arrives_at, self._last_arrival)
        return arrives_at


class Internet:
    """The cables of some nodes, and the packets between them: up the sender's line, then down the receiver's."""

    def __init__(self, cables: list[Cable], seed: int) -> None:
        self.up = [Line(cable, is_up=True, seed=f"{seed} {node} up") for node, cable in enumerate(cables)]
        self.down = [Line(cable, is_up=False, seed=f"{seed} {node} down") for node, cable in enumerate(cables)]
        #: Time, order of sending, receiver, whether it has passed the receiver's line, packet.
        self._under_way: list[tuple[float, int, int, bool, Any]] = []
        self._sent = 0

    def change(self, node: int, cable: Cable) -> None:
        """Give a node another cable."""
        self.up[node].change(cable)
        self.down[node].change(cable)

    def send(self, now: float, source: int, target: int, packet: Any, size: int) -> None:
        """A packet of so many bytes leaves its sender."""
        at = self.up[source].offer(now, size)
        if at is not None:
            self._sent += 1
            heapq.heappush(self._under_way, (at, self._sent, target, False, (packet, size)))

    def arrived(self, now: float) -> list[tuple[int, Any]]:
        """The receivers and packets that have arrived by now since the last call, in the order of their arrival."""
        under_way = self._under_way
        arrived = []
        while under_way and under_way[0][0] <= now:
            at, number, target, has_passed, packet = heapq.heappop(under_way)
            if has_passed:
                arrived.append((target, packet))
                continue
            packet, size = packet
            # At the time it came there, however late this is called: a busy machine makes no line slower.
            down_at = self.down[target].offer(at, size)
            if down_at is not None:
                heapq.heappush(under_way, (down_at, number, target, True, packet))
        return arrived

    @property
    def next_s(self) -> float | None:
        """When the next packet gets anywhere; None while nothing is under way."""
        return self._under_way[0][0] if self._under_way else None
