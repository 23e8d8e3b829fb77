"""Which node a delta is handed to on its way to an owner, so that nobody sends to everybody. Pure.

Values come back the same way: a node asks for them whom it would hand a delta to.

Node ids are read as digits of `bits` bits. A node hands a delta to one that shares one more digit with the owner than
it does itself, and of those to the one closest to itself in the remaining digits. So every node has at most 2**bits -
1 next nodes for each digit, whatever the number of nodes. Once no more than 2**bits nodes are expected to share the
digits of the owner, the owner itself is next. Nobody has to agree on groups: a node that knows only a part of the
others chooses among those.

A delta that is handed on always comes closer (`comes_closer`): it cannot go in a circle, whatever the nodes on its way
know of each other, and of who the owner is.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from overlay.ids import ID_BITS

#: More digits than any swarm needs.
MAX_LEVELS = 16


def levels(population: float, bits: int) -> int:
    """How many digits of this many bits tell so many nodes apart; at least 1. Raises `ValueError` for no bits."""
    if bits < 1:
        raise ValueError(f"digits of {bits} bits")
    found = 1
    while 2.0 ** (bits * found) < population and found < MAX_LEVELS:
        found += 1
    return found


def comes_closer(me: bytes, before: bytes, to: bytes) -> bool:
    """Whether a node may hand on to another what it has from the one before: it shares more first bits with that.

    Each request to a next node waits for those that follow from it. As these share more and more bits, none of them
    waits for itself, also where a node has heard of another owner than the node before.
    """
    here = int.from_bytes(me, "big")
    return (here ^ int.from_bytes(to, "big")).bit_length() < (here ^ int.from_bytes(before, "big")).bit_length()


class RouteTable:
    """The next nodes of one node: built once for what it knows of the others."""

    def __init__(self, me: bytes, members: Iterable[bytes], population: float, bits: int) -> None:
        """`members`: ids of the nodes that may hand on; `population`: how many nodes there are in all."""
        self._me = int.from_bytes(me, "big")
        self._bits = bits
        self.levels = levels(population, bits)
        #: (digits shared with this node, the next digit) → distance in the remaining digits, and the id: the closest.
        self._next: dict[tuple[int, int], tuple[int, bytes]] = {}
        #: The same of those that come second.
        self._second: dict[tuple[int, int], tuple[int, bytes]] = {}
        for node in members:
            if (place := self._place(node)) is None:
                continue
            remaining = ID_BITS - self._bits * (place[0] + 1)
            distance = (int.from_bytes(node, "big") ^ self._me) & ((1 << remaining) - 1)
            mine = (distance, node)
            known = self._next.get(place)
            if known is None or mine < known:
                self._next[place], mine = mine, known or mine
            if known is not None and ((second := self._second.get(place)) is None or mine < second):
                self._second[place] = mine

    def hop(self, owner: bytes, without: Container[bytes] = ()) -> bytes | None:
        """Whom to hand a delta for this owner, perhaps the owner; None: the owner is sent it without others. Not one of
        `without`: then it is the second closest, if that is none of them."""
        place = self._place(owner)
        if place is None:
            return None
        found = (table[place][1] for table in (self._next, self._second) if place in table)
        return next((node for node in found if node not in without), None)

    def relays_to(self, owner: bytes) -> int:
        """How many nodes are on the way to an owner at most, besides the owner and this node."""
        place = self._place(owner)
        return 0 if place is None else self.levels - 1 - place[0]

    def is_on_the_way(self, owner: bytes) -> bool:
        """Whether others may reach this owner by way of this node: it shares a digit with it."""
        differs = int.from_bytes(owner, "big") ^ self._me
        return self.levels > 1 and (ID_BITS - differs.bit_length()) // self._bits >= 1

    def next_nodes(self) -> list[bytes]:
        """All nodes that bundles are sent to."""
        return sorted(node for _, node in self._next.values())

    def _place(self, node: bytes) -> tuple[int, int] | None:
        """The number of digits shared with a node, and its next digit; None where it is asked directly."""
        differs = int.from_bytes(node, "big") ^ self._me
        if not differs:
            return None
        shared = (ID_BITS - differs.bit_length()) // self._bits
        if shared >= self.levels - 1:
            return None
        shift = ID_BITS - self._bits * (shared + 1)
        return shared, (int.from_bytes(node, "big") >> shift) & ((1 << self._bits) - 1)
