"""The order in which members are probed: round-robin over a shuffled list, as in SWIM.

The closest have turns of their own, because a node that has just joined a large swarm is known to those alone. Pure.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from heapq import nsmallest

#: So many of the closest have turns of their own; with up to twice as many members nobody waits long for one.
NEIGHBOURS = 20


class _Turns:
    """A shuffled list of members, and the position in it."""

    __slots__ = ("_order", "_rng", "_turn")

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._order: list[bytes] = []
        self._turn = 0

    def insert(self, node_id: bytes) -> None:
        self._order.insert(self._rng.randint(self._turn, len(self._order)), node_id)

    def next_due(self, again: Callable[[], list[bytes]], is_due: Callable[[bytes], bool]) -> list[bytes]:
        """The next member that is due, if any is; after a pass the turns begin `again` with these."""
        for _ in range(len(self._order) or 1):
            if self._turn >= len(self._order):
                self._order = again()
                self._rng.shuffle(self._order)
                self._turn = 0
                if not self._order:
                    return []
            node_id = self._order[self._turn]
            self._turn += 1
            if is_due(node_id):
                return [node_id]
        return []


class ProbeOrder:
    """The turns of all members, and those of the closest."""

    def __init__(self, own_id: bytes, rng: random.Random) -> None:
        self._own = int.from_bytes(own_id, "big")
        self._all = _Turns(rng)
        self._near = _Turns(rng)
        self._radius = 0  # of the closest when their turns began: a new member within it is one of them

    def _distance(self, node_id: bytes) -> int:
        return int.from_bytes(node_id, "big") ^ self._own

    def insert(self, node_id: bytes) -> None:
        """A new member gets a random place in the rest of this pass: its first probe is not late, nor foreseeable."""
        self._all.insert(node_id)
        if self._distance(node_id) < self._radius:
            self._near.insert(node_id)

    def next_due(self, members: Collection[bytes], is_due: Callable[[bytes], bool]) -> list[bytes]:
        """The next member that is due, and the next of the closest; after a pass all `members` are reshuffled. Removed
        ones are never due."""

        def closest() -> list[bytes]:
            nearest = nsmallest(NEIGHBOURS, members, key=self._distance)
            self._radius = self._distance(nearest[-1])
            return nearest

        chosen = self._all.next_due(lambda: list(members), is_due)
        return chosen + self._near.next_due(closest, is_due) if len(members) > 2 * NEIGHBOURS else chosen
