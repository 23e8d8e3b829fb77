"""Random numbers of a simulated node: SplitMix64, one stream per node and purpose.

With its own stream a node's step times do not depend on the other nodes. Under every barrier node 7 takes the same time
for its 12th step, so barriers are compared on the same swarm (common random numbers). The compiled engine does the same
arithmetic on machine words. (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.) Pure.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB

#: Purposes of streams. Their numbers determine the history of a seed: never change them.
DURATIONS, SAMPLES, POOLS, ESTIMATES, CHURN, WEIGHTS = range(6)


def mixed(value: Any) -> Any:
    """SplitMix64's output function on 64 bits: of an int, or of a uint64 array."""
    value = ((value ^ (value >> 30)) * MIX_1) & MASK
    value = ((value ^ (value >> 27)) * MIX_2) & MASK
    return value ^ (value >> 31)


def origin(seed: int, purpose: int) -> int:
    """The origin of one purpose; the stream of node i begins at `mixed(origin + (i + 1)·GAMMA)`."""
    return int(mixed((mixed((seed + GAMMA) & MASK) + (purpose + 1) * GAMMA) & MASK))


def initial_states(seed: int, purpose: int, nodes: int) -> NDArray[np.uint64]:
    """uint64[nodes]: the state in which each node's stream of one purpose begins."""
    start = np.arange(1, nodes + 1, dtype=np.uint64) * np.uint64(GAMMA) + np.uint64(origin(seed, purpose))
    found: NDArray[np.uint64] = mixed(start)
    return found


class RandomStream:
    """Uniform, exponential, normal and gamma numbers of one node."""

    __slots__ = ("state",)

    def __init__(self, seed: int, purpose: int, node: int) -> None:
        self.state: int = mixed((origin(seed, purpose) + (node + 1) * GAMMA) & MASK)

    def uniform(self) -> float:
        """In [0, 1), 53 bits."""
        self.state = (self.state + GAMMA) & MASK
        return float((mixed(self.state) >> 11) * 2.0**-53)

    def below(self, count: int) -> int:
        """A whole number from 0 to count − 1. Its bias is below 2⁻³⁰ for the counts used here."""
        return int(self.uniform() * count)

    def exponential(self) -> float:
        """Mean 1."""
        return -math.log(1.0 - self.uniform())

    def normal(self) -> float:
        """Mean 0, variance 1: Box and Muller's cosine; without their sine the stream has no further state."""
        radius = math.sqrt(-2.0 * math.log(1.0 - self.uniform()))
        return radius * math.cos(2.0 * math.pi * self.uniform())

    def gamma(self, shape: float) -> float:
        """Scale 1. Marsaglia and Tsang, ACM TOMS 26 (2000) 363; below shape 1 their boost."""
        boost = 1.0
        if shape < 1.0:
            boost = (1.0 - self.uniform()) ** (1.0 / shape)
            shape += 1.0
        third = shape - 1.0 / 3.0
        factor = 1.0 / math.sqrt(9.0 * third)
        while True:
            normal = self.normal()
            cube = 1.0 + factor * normal
            if cube <= 0.0:
                continue
            cube = cube * cube * cube
            if math.log(1.0 - self.uniform()) < 0.5 * normal * normal + third - third * cube + third * math.log(cube):
                return boost * third * cube
