"""Adaptive time-outs from measured round trips (RFC 6298).

A wait is the mean of the measured round trips plus four deviations, between a floor and the ceiling that the settings
give. One retry follows, and the whole call never exceeds the ceiling. Pure.
"""

from __future__ import annotations

from overlay.peer_table import DEVIATION_WEIGHT, MEAN_WEIGHT
from overlay.peers import Peer

#: Below this a busy loop, not the network, causes time-outs.
FLOOR_S = 0.1
#: First wait before anything has been measured.
UNMEASURED_S = 0.25
DEVIATIONS = 4.0


class RttEstimator:
    """Running mean and deviation over all peers; a peer with round trips of its own gets its own waits."""

    def __init__(self, ceiling_s: float) -> None:
        self.ceiling_s = ceiling_s
        self.mean_s: float | None = None
        self.deviation_s = 0.0

    def observe(self, rtt_s: float) -> None:
        """Add a round trip of the datagram that was answered (Karn's rule: never an ambiguous one)."""
        if self.mean_s is None:
            self.mean_s, self.deviation_s = rtt_s, rtt_s / 2
            return
        error = rtt_s - self.mean_s
        self.mean_s += MEAN_WEIGHT * error
        self.deviation_s += DEVIATION_WEIGHT * (abs(error) - self.deviation_s)

    def waits(self, peer: Peer | None, stretch: float = 1.0) -> tuple[float, float]:
        """Seconds until the retry, and from the retry until the time-out."""
        if peer is not None and peer.round_trip_s is not None:
            wait = peer.round_trip_s + DEVIATIONS * peer.round_trip_deviation_s
        elif self.mean_s is not None:
            wait = self.mean_s + DEVIATIONS * self.deviation_s
        else:
            wait = UNMEASURED_S
        first = min(max(wait, FLOOR_S), self.ceiling_s / 2)
        second = max(first, min(wait, self.ceiling_s - first))
        return first * stretch, second * stretch
