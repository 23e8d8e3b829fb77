"""Compares how many nodes train by this node's count and by those that other members send along. Pure.

The weight of a delta is its node's share of the nodes that train, so nodes that count differently make a sum of shares
that is not one. A push names the count that its weight was made with, and its owner lowers the weight to its own count
(`training.exchange.owner.validation`); the answer names the owner's count. Two views differ for a moment after each
change. Where they differ for long one of the nodes does not know all that train, and what its script divides by that
number is wrong: `/status` names it.
"""

from __future__ import annotations

#: Counts that differ by this factor are no matter of chance: of nodes that are known one by one, and of an estimate.
COUNTED_FACTOR, ESTIMATED_FACTOR = 1.2, 1.5
#: Views that differ for so long do not differ because somebody has just come or gone: three times the detection bound.
LASTING_S = 30.0
#: Members whose counts are remembered.
MAX_MEMBERS = 1024


def factor_of(*, exact: bool) -> float:
    """By which factor counts have to differ, where this node's is exact or an estimate."""
    return COUNTED_FACTOR if exact else ESTIMATED_FACTOR


def corrected(weight: float, theirs: float, mine: float, *, exact: bool) -> float:
    """A weight that was made with the count `theirs`, as the count `mine` makes it if that is larger. Nobody counts
    nodes that are not there for longer than it takes to miss one, so the larger count is the better one."""
    return weight * theirs / mine if 0.0 < theirs * factor_of(exact=exact) <= mine else weight


class CountComparison:
    """The members whose counts differ from this node's, and since when."""

    def __init__(self) -> None:
        #: Since when and until when, in monotonic seconds, and the last count of each.
        self._differing: dict[bytes, tuple[float, float, float]] = {}

    def note(self, node: bytes, theirs: float, mine: float, *, exact: bool, now: float) -> None:
        """A member has sent its count; 0: it sent none."""
        since, _, _ = self._differing.pop(node, (now, 0.0, 0.0))
        factor = factor_of(exact=exact)
        if theirs > 0.0 and (theirs * factor <= mine or mine * factor <= theirs):
            self._differing[node] = since, now, theirs
            if len(self._differing) > MAX_MEMBERS:
                del self._differing[next(iter(self._differing))]

    def lasting(self) -> list[tuple[bytes, float]]:
        """The members whose counts have differed for `LASTING_S`, with their counts."""
        return [
            (node, theirs) for node, (since, until, theirs) in self._differing.items() if until - since >= LASTING_S
        ]
