"""Limits on what one party may ask of this node: token buckets by party.

Pure. `now` is passed in, nothing waits. A bucket holds up to `burst` tokens and gains `rate_per_s` of them per second.
If a caller finds none, it gets the seconds until there is one.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

#: A caller that waited for the returned time must not lack a token because of float rounding.
ROUNDING = 1e-6
#: Parties whose buckets are kept; beyond it the one that asked longest ago is forgotten.
MAX_PARTIES = 1024

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class RateLimit:
    """What one party may do: `rate_per_s` on average, `burst` at once after a rest."""

    rate_per_s: float
    burst: float


class TokenBucket:
    """The tokens of one party. Begins full."""

    __slots__ = ("_at", "_limit", "_tokens")

    def __init__(self, limit: RateLimit, now: float) -> None:
        self._limit = limit
        self._tokens = limit.burst
        self._at = now

    def take(self, now: float) -> float:
        """Take a token and return 0.0; if there is none, return the seconds until there is."""
        if now > self._at:  # a clock that steps back neither adds nor removes tokens
            gained = (now - self._at) * self._limit.rate_per_s
            self._tokens = min(self._limit.burst, self._tokens + gained)
            self._at = now
        if self._tokens >= 1.0 - ROUNDING:
            self._tokens -= 1.0
            return 0.0
        return (1.0 - self._tokens) / self._limit.rate_per_s


class RateLimiter(Generic[Key]):
    """A bucket for each of the last `MAX_PARTIES` parties."""

    def __init__(self, limit: RateLimit) -> None:
        self._limit = limit
        self._buckets: dict[Key, TokenBucket] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, party: Key, now: float) -> float:
        """See `TokenBucket.take`."""
        bucket = self._buckets.pop(party, None)
        if bucket is None:
            bucket = TokenBucket(self._limit, now)
        self._buckets[party] = bucket  # last in order: it asked most recently
        if len(self._buckets) > MAX_PARTIES:
            del self._buckets[next(iter(self._buckets))]
        return bucket.take(now)
