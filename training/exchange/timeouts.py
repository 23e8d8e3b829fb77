"""Adaptive request timeouts: median response time plus four median absolute deviations, between a floor and a ceiling.

A timeout bounds silence, not the transfer: a slow link that delivers bytes is waited for, and a response time begins
when the peer has the request. Response times are measured per kind of request and per peer, so that one slow peer
delays no other. For a peer without measurements those of all peers count. After a timeout the next one is longer
(RFC 6298 section 5.5): the peer, or the queue before a slow line, may have become slower than any measurement. So the
ceiling bounds the first silence, by which a dead node is found. A peer that did answer after more, twice, on later
attempts, is given as long from then on: without that, every other request to it would fail. Pure.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Literal, NamedTuple

Kind = Literal["push", "pull", "forward", "state", "fetch", "seek", "mend", "question"]

#: Response times kept per kind and peer, and how many are needed for an estimate.
MAX_MEASUREMENTS, MIN_MEASUREMENTS = 16, 4
#: Pairs of kind and peer kept; the one with the oldest answer is dropped.
MAX_KEYS = 1024
DEVIATIONS = 4.0
#: Each timeout in a row makes the next one longer by this factor, up to this one in all.
BACKOFF, MAX_BACKOFF = 1.5, 8.0
#: A peer is given so many times its second longest response time of late, whatever the ceiling.
ABOVE_LONGEST = 1.5


class Range(NamedTuple):
    """Seconds: before anything is measured, at least, and at most."""

    first_s: float
    floor_s: float
    ceiling_s: float


#: With this ceiling detection, take-over and first answer stay within the detection bound of 10 s.
REQUEST = Range(3.0, 2.0, 4.5)
#: Below the floor of every request: an owner that waits for its backup answers `retry` before its callers time out.
FORWARD = Range(1.5, 0.75, 1.75)
#: A small question that is answered at once. Behind a full line its answer takes as long as the queues are.
QUESTION = Range(1.0, 1.0, 4.5)


_LIMITS: dict[Kind, Range] = {"forward": FORWARD, "question": QUESTION}
#: A timeout up to this is the same for a peer that the failure detector suspects.
LOWEST_CEILING_S = min(limits.ceiling_s for limits in (REQUEST, FORWARD, QUESTION))


class AdaptiveTimeouts:
    """The response times of the peers of one node."""

    def __init__(self) -> None:
        self._measured: dict[tuple[Kind, bytes], deque[float]] = {}
        self._of_kind: dict[Kind, deque[float]] = {}
        self._backed_off: dict[tuple[Kind, bytes], float] = {}

    def timeout_s(self, kind: Kind, peer: bytes, *, is_suspect: bool = False) -> float:
        """Seconds of silence after which a request of this kind to this peer has failed; for one that the failure
        detector suspects or has found dead no more than the ceiling, because it is about to be replaced."""
        limits = _LIMITS.get(kind, REQUEST)
        own = self._measured.get((kind, peer), ())
        seen = own if len(own) >= MIN_MEASUREMENTS else self._of_kind.get(kind, ())
        wanted_s = limits.first_s
        if len(seen) >= MIN_MEASUREMENTS:
            # No deviation is longer than the longest time: of quick answers the estimate is below the floor anyway.
            wanted_s = limits.floor_s
            if (1.0 + DEVIATIONS) * max(seen) > limits.floor_s:
                middle_s = median(seen)
                wanted_s = middle_s + DEVIATIONS * median(abs(seconds - middle_s) for seconds in seen)
        wanted_s = min(max(limits.floor_s, wanted_s), limits.ceiling_s)
        if len(own) > 1 and max(own) > limits.ceiling_s and (longest_s := sorted(own)[-2]) > limits.ceiling_s:
            wanted_s = ABOVE_LONGEST * longest_s
        wanted_s *= self._backed_off.get((kind, peer), 1.0)
        return min(wanted_s, limits.ceiling_s) if is_suspect else wanted_s

    def on_response(self, kind: Kind, peer: bytes, seconds: float) -> None:
        """The answer began so many seconds after the last byte of the request had arrived."""
        key = (kind, peer)
        own = self._measured.pop(key, None) or deque(maxlen=MAX_MEASUREMENTS)
        own.append(seconds)
        self._measured[key] = own
        self._of_kind.setdefault(kind, deque(maxlen=4 * MAX_MEASUREMENTS)).append(seconds)
        self._backed_off.pop(key, None)
        while len(self._measured) > MAX_KEYS:
            del self._measured[next(iter(self._measured))]

    def on_timeout(self, kind: Kind, peer: bytes) -> None:
        """The timeout passed without an answer."""
        key = (kind, peer)
        self._backed_off[key] = min(self._backed_off.pop(key, 1.0) * BACKOFF, MAX_BACKOFF)
        while len(self._backed_off) > MAX_KEYS:
            del self._backed_off[next(iter(self._backed_off))]
