"""What members have said of themselves: that they own a shard, under which term. Pure.

Whoever owns a shard under a term, and loses it, hears of a higher term then. So a member that claims a shard, and is
asked for it later, does what an owner does, or names one under a term at least as high. One that denies instead
contradicts itself. Honest members do so too, rarely: in a new start, and for a moment when they step down for a better
copy (`training.exchange.recovery.failover`). Therefore it counts as `training.exchange.reliability` says, and each
claim once.
"""

from __future__ import annotations

from training.exchange.terms import ZERO_TERM, Term

#: Claims that are remembered; the one that was made longest ago is forgotten first.
MAX_CLAIMS = 8192


class SelfClaims:
    """The claims that one node has heard."""

    def __init__(self) -> None:
        #: By member and shard: the highest term, and when the first claim came that was not denied since.
        self._claims: dict[tuple[bytes, int], tuple[Term, float]] = {}

    def note(self, node: bytes, shard: int, term: Term, now_s: float) -> None:
        """A member says that it owns a shard."""
        former, since_s = self._claims.pop((node, shard), (term, now_s))
        self._claims[node, shard] = max(former, term), since_s
        if len(self._claims) > MAX_CLAIMS:
            del self._claims[next(iter(self._claims))]

    def contradicts(self, node: bytes, shard: int, named: Term | None, asked_s: float, fence: Term = ZERO_TERM) -> bool:
        """Whether a member that was asked at this moment denies what it had claimed until then. `named`: the term of
        the owner that it names; without one, `fence` is the highest term that it has seen, as far as it says so. The
        claim is settled by the answer."""
        term, since_s = self._claims.get((node, shard), (ZERO_TERM, asked_s))
        if since_s >= asked_s:
            return False  # it may have become the owner after it answered
        del self._claims[node, shard]
        return fence <= term if named is None else named < term

    def forget(self, node: bytes) -> None:
        """It was started again, and need not know what it claimed before."""
        for key in [key for key in self._claims if key[0] == node]:
            del self._claims[key]
