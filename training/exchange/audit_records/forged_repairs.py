"""Who has offered deltas, in repairs, that the nodes they name have not made. Pure.

The member that offers and the node that denies contradict each other, and either may lie. One that contradicts
`ORIGINS` nodes is the liar, where one member lies, or it has taken forged deltas in good faith while those nodes could
not be asked. So it is not left out: what it offers is not heard for `IGNORED_S`, and stays in its log meanwhile.
"""

from __future__ import annotations

WINDOW_S = 600.0
ORIGINS = 2
IGNORED_S = 60.0
#: Pairs that are remembered; the one that was noted longest ago is forgotten first.
MAX_NOTED = 1024


class ForgedRepairs:
    """What one node has been told; times in monotonic seconds."""

    def __init__(self) -> None:
        #: When each origin denied last what a member had offered, by member and origin.
        self._denied: dict[tuple[bytes, bytes], float] = {}
        self._ignored_until_s: dict[bytes, float] = {}

    def note(self, member: bytes, origin: bytes, now_s: float) -> bool:
        """A member has offered a delta that its origin denies; whether the member is not heard from now on."""
        self._denied.pop((member, origin), None)
        self._denied[member, origin] = now_s
        if len(self._denied) > MAX_NOTED:
            del self._denied[next(iter(self._denied))]
        origins = [pair for pair, at_s in self._denied.items() if pair[0] == member and now_s - at_s < WINDOW_S]
        if len(origins) < ORIGINS:
            return False
        for pair in origins:
            del self._denied[pair]
        self._ignored_until_s = {one: until_s for one, until_s in self._ignored_until_s.items() if until_s > now_s}
        self._ignored_until_s[member] = now_s + IGNORED_S
        return True

    def is_ignored(self, member: bytes, now_s: float) -> bool:
        """Whether what a member offers is not heard now."""
        return now_s < self._ignored_until_s.get(member, 0.0)
