"""The order in which members are probed: round-robin over a shuffled list, as in SWIM (Das et al. 2002, section 4.3).

Each member is probed once per pass, so the time until a crashed one is probed is bounded. Pure.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection


class ProbeOrder:
    """A shuffled list of members, and the position in it."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._order: list[bytes] = []
        self._turn = 0

    def insert(self, node_id: bytes) -> None:
        """A new member gets a random place in the rest of this pass: its first probe is not late, nor foreseeable."""
        self._order.insert(self._rng.randint(self._turn, len(self._order)), node_id)

    def next_due(self, members: Collection[bytes], is_due: Callable[[bytes], bool]) -> bytes | None:
        """The next member that is due; after a pass all `members` are reshuffled. Removed ones are never due."""
        for _ in range(len(self._order)):
            if self._turn >= len(self._order):
                self._order = list(members)
                self._rng.shuffle(self._order)
                self._turn = 0
                if not self._order:
                    return None
            node_id = self._order[self._turn]
            self._turn += 1
            if is_due(node_id):
                return node_id
        return None
