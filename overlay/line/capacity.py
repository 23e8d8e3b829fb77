"""Capacity classes: a node's upload rate as a small integer on which peers can agree, and the weights that follow.

A class is a power of two of the rate, so the share of shards of a node is right to a factor of two. A class changes
only when the rate has left it by a quarter of an octave in two rounds of measurement, so noise moves no shard. Only
ratios between nodes matter: where all classes are equal, or none is known, all weights are equal.

A node at a sixteenth of the median class or below is under the *floor*: it should own nothing. A node far above the
median counts as eight times the median: its memory is not larger because its line is faster. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

#: What a node announces before it has measured its line; it counts as the median class.
UNKNOWN = 0
#: Added to a class that is only a lower bound.
AT_LEAST = 16
#: The upper end of class 1, in bytes per second; every further class is twice as fast.
CLASS_BYTES_PER_S = 16 * 1024.0
#: The fastest class: 64 MiB/s (0.5 Gbit/s) or more. Above it processors set the rate, and they are shared.
TOP_CLASS = 14
#: A rate must leave its class by this many octaves, in so many rounds in a row, before the class changes.
MARGIN_OCTAVES = 0.25
CONFIRMATIONS = 2
#: Classes below the median at which a node owns nothing, and above it that count.
FLOOR_CLASSES = 4
MAX_CLASSES_ABOVE = 3


def class_of(bytes_per_s: float) -> int:
    """The class of a rate, from 1 to `TOP_CLASS`."""
    return min(max(math.floor(_octaves(bytes_per_s)) + 1, 1), TOP_CLASS)


def _octaves(bytes_per_s: float) -> float:
    return math.log2(max(bytes_per_s, 1.0) / CLASS_BYTES_PER_S) + 1


class CapacityClass:
    """What a node announces: the class of its rate, with hysteresis.

    A rate may be a lower bound, of a line that is never full. A bound raises the class and never lowers it; the class
    is then announced as one, with `AT_LEAST` added.
    """

    def __init__(self) -> None:
        self.announced = UNKNOWN
        self._wanted = UNKNOWN
        self._streak = 0

    def begin(self, announced: int) -> bool:
        """Announce this class, or bound, at once; returns False, and changes nothing, where one is known already, or
        it is none."""
        if self.announced != UNKNOWN or split(announced)[0] == UNKNOWN:
            return False
        self.announced, self._wanted, self._streak = announced, UNKNOWN, 0
        return True

    def update(self, bytes_per_s: float, *, is_exact: bool) -> None:
        """Take the rate after one more round of measurement."""
        present, is_bound = split(self.announced)
        found = class_of(bytes_per_s)
        above = _octaves(bytes_per_s) - present
        is_inside = present != UNKNOWN and -1 - MARGIN_OCTAVES <= above <= MARGIN_OCTAVES
        if found == present or is_inside:
            wanted = present + AT_LEAST * (is_bound and not is_exact)
        elif is_exact:
            wanted = found
        else:
            wanted = found + AT_LEAST if found > present else self.announced
        if wanted == self.announced:
            self._streak = 0
            return
        self._streak = self._streak + 1 if wanted == self._wanted else 1
        self._wanted = wanted
        if self._streak >= CONFIRMATIONS:
            self.announced, self._streak = wanted, 0


def split(announced: int) -> tuple[int, bool]:
    """The class in what a node announces, and whether it is only a lower bound; unknown where it is neither."""
    value, is_bound = announced % AT_LEAST, announced >= AT_LEAST
    return (value, is_bound) if 0 < value <= TOP_CLASS and announced < 2 * AT_LEAST else (UNKNOWN, False)


def weight_exponents(announced: Mapping[bytes, int]) -> dict[bytes, int | None]:
    """For each node the binary logarithm of its weight relative to the median; None for a node under the floor.

    An unknown class counts as the median. Of two medians the larger one counts: of two nodes the slower may be under
    the floor, the faster never is. Nodes whose class is a lower bound are all in one class, the highest of these
    bounds: how busy their lines were is no reason to prefer one.
    """
    found = {node_id: split(value) for node_id, value in announced.items()}
    highest_bound = max((value for value, is_bound in found.values() if is_bound), default=UNKNOWN)
    classes = {node_id: highest_bound if is_bound else value for node_id, (value, is_bound) in found.items()}
    known = sorted(value for value in classes.values() if value != UNKNOWN)
    if not known or known[0] == known[-1]:
        return dict.fromkeys(classes, 0)
    middle = known[len(known) // 2]
    return {node_id: _exponent(value, middle) for node_id, value in classes.items()}


def _exponent(value: int, middle: int) -> int | None:
    if value == UNKNOWN:
        return 0
    return None if middle - value >= FLOOR_CLASSES else min(value - middle, MAX_CLASSES_ABOVE)
