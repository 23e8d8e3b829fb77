"""When the next of several requests to one receiver may begin: so few travel at once that many pieces share each. Pure.

A second one beside the first costs both ends as much as the first, and takes what would have gone together. On a quick
line the first has its answer before much has come. On a slow line, or behind one that waits for something else, the
next begins after a moment.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import inf

#: The next begins when the one before has its answer, or after this.
STAGGER_S = 0.01


class Staggered:
    """What is under way to each receiver, at most `most` at once."""

    def __init__(self, most: int, stagger_s: float = STAGGER_S) -> None:
        self._most = most
        self._stagger_s = stagger_s
        #: When each of them began, in order.
        self._began_s: dict[Hashable, list[float]] = {}

    def wait_s(self, receiver: Hashable, now_s: float) -> float:
        """Seconds until the next may begin; infinite: when one of those under way has ended."""
        began_s = self._began_s.get(receiver)
        if not began_s:
            return 0.0
        return inf if len(began_s) >= self._most else max(0.0, began_s[-1] + self._stagger_s - now_s)

    def begin(self, receiver: Hashable, now_s: float) -> float:
        """One begins; `end` follows, with what this returns."""
        self._began_s.setdefault(receiver, []).append(now_s)
        return now_s

    def end(self, receiver: Hashable, began_s: float) -> None:
        """The one that began then has ended."""
        under_way = self._began_s[receiver]
        under_way.remove(began_s)
        if not under_way:
            del self._began_s[receiver]
