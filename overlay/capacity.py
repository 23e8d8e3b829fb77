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
    """The class that a node announces: the class of its rate, with hysteresis."""

    def __init__(self) -> None:
        self.value = UNKNOWN
        self._streak = 0

    def update(self, bytes_per_s: float) -> None:
        """Take the rate after one more round of measurement."""
        found = class_of(bytes_per_s)
        above = _octaves(bytes_per_s) - self.value
        is_inside = self.value != UNKNOWN and -1 - MARGIN_OCTAVES <= above <= MARGIN_OCTAVES
        if found == self.value or is_inside:
            self._streak = 0
            return
        self._streak += 1
        if self._streak >= CONFIRMATIONS:
            self.value, self._streak = found, 0


def weight_exponents(classes: Mapping[bytes, int]) -> dict[bytes, int | None]:
    """For each node the binary logarithm of its weight relative to the median; None for a node under the floor.

    An unknown class counts as the median. Of two medians the larger one counts: of two nodes the slower may be under
    the floor, the faster never is.
    """
    known = sorted(value for value in classes.values() if value != UNKNOWN)
    if not known or known[0] == known[-1]:
        return dict.fromkeys(classes, 0)
    middle = known[len(known) // 2]
    return {node_id: _exponent(value, middle) for node_id, value in classes.items()}


def _exponent(value: int, middle: int) -> int | None:
    if value == UNKNOWN:
        return 0
    return None if middle - value >= FLOOR_CLASSES else min(value - middle, MAX_CLASSES_ABOVE)
