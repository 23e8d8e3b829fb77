"""The range in which training lives: which deltas may be added, and which states may be used. Pure.

A float32 that is infinite stays so, and everything computed from it. So no delta may bring a value near that, and no
state from elsewhere may have one. `MAX_LENGTH` is far above everything that trains and far below what overflows: the
sum of any number of such deltas that can be sent is finite. Below it, a delta is compared with the lengths of those
that were added before. The bounds are generous: what is worth clipping is decided by `training.shards.robust`.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.shards.robust import norm_of

#: The longest delta, and the longest array of a state, of any size.
MAX_LENGTH = 1e15
MAX_STATE_LENGTH = 1e18
#: A delta may be this many times as long as the median of the members' last ones.
RANGE_MULTIPLE = 1000.0
#: It may always have this root mean square: the gradients of a shard may have been nearly zero until now.
MEAN_ALWAYS = 0.1
#: It may have this one while few members have sent a delta: a layer's values and their changes are of that size.
MEAN_AT_FIRST = 10.0


def has_length(values: Vector, limit: float) -> bool:
    """Whether an array, `float32[n]`, is at most this long; one that is not finite is not."""
    return norm_of(values) <= limit


@lru_cache(maxsize=256)
def surely_short(size: int) -> int:
    """A magnitude, as the bits of a float32: an array of `size` values without a larger one is no longer than
    `MAX_STATE_LENGTH`, whatever the rounding. A longer one may be too."""
    return int(np.float32(MAX_STATE_LENGTH / (2 * math.sqrt(max(1, size)))).view(np.uint32))


def is_delta_in_range(values: Vector) -> bool:
    """Whether a delta may be added to anything."""
    return norm_of(values) <= MAX_LENGTH


def longest(size: int, reference: float) -> float:
    """The longest delta of so many values after others of about the length `reference`."""
    return min(MAX_LENGTH, max(RANGE_MULTIPLE * reference, MEAN_ALWAYS * math.sqrt(size)))


def is_usual_at_first(size: int, norm: float) -> bool:
    """Whether a delta may be added although too few others are known to compare it with."""
    return norm <= MEAN_AT_FIRST * math.sqrt(size)
