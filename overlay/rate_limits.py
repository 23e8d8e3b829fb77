"""Limits on what one party may ask of this node: token buckets by party.

Pure. `now` is passed in, nothing waits. A bucket holds up to `burst` tokens and gains `rate_per_s` of them per second.
If a caller finds too few, it gets the seconds until there are enough. The caller chooses the key of a party: a proven
node id, or an address. Because an attacker may invent unproven keys, newcomers share one extra bucket while the table
is full.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

#: A caller that waited for the returned time must not lack a token because of float rounding.
ROUNDING = 1e-6

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class RateLimit:
    """What one party may do: `rate_per_s` on average, `burst` at once after a rest. A rate of 0 means no limit."""

    rate_per_s: float
    burst: float


class TokenBucket:
    """The tokens of one party. Begins full."""

    __slots__ = ("_at", "_tokens", "limit")

    def __init__(self, limit: RateLimit, now: float) -> None:
        self.limit = limit
        self._tokens = limit.burst
        self._at = now

    def take(self, now: float, amount: float = 1.0) -> float:
        """Take `amount` tokens and return 0.0; if there are too few, take none and return the seconds until there are.

        A request for more than `burst` succeeds when the bucket is full and leaves a negative balance. So large
        requests are possible, but the next one has to wait.
        """
        if not self.limit.rate_per_s:
            return 0.0
        if now > self._at:  # as `_fill`; each request asks
            gained = (now - self._at) * self.limit.rate_per_s
            self._tokens = min(self.limit.burst, self._tokens + gained)
            self._at = now
        needed = min(amount, self.limit.burst)
        if self._tokens >= needed - ROUNDING:
            self._tokens -= amount
            return 0.0
        return (needed - self._tokens) / self.limit.rate_per_s

    def is_full(self, now: float) -> bool:
        """Whether the bucket equals a new one, so that it can be forgotten."""
        self._fill(now)
        return self._tokens >= self.limit.burst

    def _fill(self, now: float) -> None:
        # A clock that steps back neither adds nor removes tokens.
        gained = max(0.0, now - self._at) * self.limit.rate_per_s
        self._tokens = min(self.limit.burst, self._tokens + gained)
        self._at = max(self._at, now)


class RateLimiter(Generic[Key]):
    """Buckets by party, at most `max_parties` of them.

    When the table is full, full buckets are removed, because nothing is lost with them. If there are none, the bucket
    that was not used for longest is removed. The newcomer first takes its tokens from a bucket that all newcomers
    share. So invented parties do not multiply the limit beyond `max_parties`.
    """

    def __init__(self, limit: RateLimit, *, max_parties: int = 1024) -> None:
        self.limit = limit
        self._max_parties = max_parties
        self._buckets: dict[Key, TokenBucket] = {}
        self._newcomers: TokenBucket | None = None

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, party: Key, now: float, amount: float = 1.0) -> float:
        """See `TokenBucket.take`."""
        bucket = self._buckets.pop(party, None)
        if bucket is None:
            if len(self._buckets) >= self._max_parties:
                wait_s = self._admit(now, amount)
                if wait_s:
                    return wait_s
            bucket = TokenBucket(self.limit, now)
        self._buckets[party] = bucket  # last in order: touched most recently
        return bucket.take(now, amount)

    def _admit(self, now: float, amount: float) -> float:
        recovered = [party for party, bucket in self._buckets.items() if bucket.is_full(now)]
        for party in recovered:
            del self._buckets[party]
        if recovered:
            return 0.0
        if self._newcomers is None:
            self._newcomers = TokenBucket(self.limit, now)
        wait_s = self._newcomers.take(now, amount)
        if not wait_s:
            del self._buckets[next(iter(self._buckets))]
        return wait_s
