"""How much one party may ask of this node: token buckets, and a bounded table of them by peer.

Pure. `now` is passed in, nothing waits. A bucket holds up to `burst` tokens and gains `rate_per_s` of them; who finds
too few is told how long it takes until there are enough. Nothing here says who a peer is: the caller brings an id it
believes (a node's, or an address). A stranger who makes up ids gets a fresh bucket for each, so that a table also has
one bucket that all newcomers share.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

#: Whoever waits as long as it was told must not be short of a token by the last bit of a float.
ROUNDING = 1e-6

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class RateLimit:
    """What one party may do: `rate_per_s` for ever, `burst` at once after a rest. A rate of 0 is no limit."""

    rate_per_s: float
    burst: float


class TokenBucket:
    """One party's tokens. Begins full."""

    __slots__ = ("_at", "_tokens", "limit")

    def __init__(self, limit: RateLimit, now: float) -> None:
        self.limit = limit
        self._tokens = limit.burst
        self._at = now

    def take(self, now: float, amount: float = 1.0) -> float:
        """Take `amount` tokens: 0.0 when they were there, otherwise nothing is taken and the seconds until they are.

        More than a whole bucket is had when the bucket is full, and leaves it in debt: a single large request is
        slow to be followed by another, and never impossible.
        """
        if not self.limit.rate_per_s:
            return 0.0
        self._fill(now)
        needed = min(amount, self.limit.burst)
        if self._tokens >= needed - ROUNDING:
            self._tokens -= amount
            return 0.0
        return (needed - self._tokens) / self.limit.rate_per_s

    def is_full(self, now: float) -> bool:
        """Whether nothing of it is remembered that a new one would not have."""
        self._fill(now)
        return self._tokens >= self.limit.burst

    def _fill(self, now: float) -> None:
        # A clock that steps back gives nothing and takes nothing.
        gained = max(0.0, now - self._at) * self.limit.rate_per_s
        self._tokens = min(self.limit.burst, self._tokens + gained)
        self._at = max(self._at, now)


class RateLimiter(Generic[Key]):
    """Buckets by party, at most `most` of them.

    When the table is full, those that have recovered go; where none has, the longest untouched. A newcomer whose
    bucket would push another out takes its first tokens from one that all such newcomers share: inventing parties does
    not multiply the allowance beyond `most`.
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


class ConcurrencyLimit(Generic[Key]):
    """How many things each party has open, at most `max_each` apiece. `enter` and `leave` come in pairs."""

    def __init__(self, max_each: int) -> None:
        self.max_each = max_each
        self._open: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._open)

    def count(self, party: Key) -> int:
        """How many this party has open."""
        return self._open.get(party, 0)

    def enter(self, party: Key) -> bool:
        """False when it has its share open already; then there is nothing to leave."""
        count = self._open.get(party, 0)
        if count >= self.max_each:
            return False
        self._open[party] = count + 1
        return True

    def leave(self, party: Key) -> None:
        """What `enter` allowed has ended."""
        count = self._open.get(party, 0)
        if count <= 1:
            self._open.pop(party, None)
        else:
            self._open[party] = count - 1
