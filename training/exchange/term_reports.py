"""How high the terms are that other members know: what one member alone claims is compared with the others. Pure.

A node that has just started knows no term, and believes the first one that it is told. If that was a lie, it refuses
all owners from then on, because their terms are lower. The members that it meets later show what the history of the
swarm explains: two of them, and most of those that it has asked.
"""

from __future__ import annotations

from collections.abc import Iterable

from training.exchange.terms import GENERATION, MAX_GENERATIONS_AHEAD, OwnerInfo, generation_of

#: Members that are remembered; the one that answered longest ago is forgotten first.
MAX_MEMBERS = 64


class TermReports:
    """The highest generation of each member that has named owners."""

    def __init__(self) -> None:
        self._highest: dict[bytes, int] = {}

    def note(self, node: bytes, infos: Iterable[OwnerInfo]) -> bool:
        """A member has named the owners that it knows; False if it knows none."""
        found = max((generation_of(info.term) for info in infos), default=None)
        if found is None:
            return False
        self._highest.pop(node, None)
        self._highest[node] = found
        if len(self._highest) > MAX_MEMBERS:
            del self._highest[next(iter(self._highest))]
        return True

    @property
    def count(self) -> int:
        """How many members have named owners."""
        return len(self._highest)

    def highest_explained(self, own: int) -> int | None:
        """The highest number of a term that the others explain, where they contradict the highest one that this node
        knows (`own`); None where they do not, or too few have been asked."""
        generation = own // GENERATION
        below = [found for found in self._highest.values() if found + MAX_GENERATIONS_AHEAD < generation]
        if len(below) < 2 or 2 * len(below) <= len(self._highest):
            return None
        return (max(below) + MAX_GENERATIONS_AHEAD + 1) * GENERATION - 1
