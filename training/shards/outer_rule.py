"""The outer rule: how a delta changes value and momentum of a shard. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from training import kernels
from training.encoding.codecs import Vector
from training.shards.robust import Robust

#: Values worked on at a time: six arrays of this many float32 fit a core's second cache.
BLOCK_VALUES = 32768


class Rule(msgspec.Struct, frozen=True):
    """The outer rule, shared by the swarm (in the manifest)."""

    outer_lr: float
    outer_momentum: float
    robust: Robust = ""


@lru_cache(maxsize=4)
def _factors(rule: Rule) -> tuple[Vector, Vector, Vector]:
    """outer_lr, outer_momentum and their product as arrays without dimensions: on the small shards of a small model
    NumPy takes longer to look at a number than to multiply by it."""
    numbers = (rule.outer_lr, rule.outer_momentum, rule.outer_lr * rule.outer_momentum)
    lr, mu, lr_mu = (np.array(number, dtype=np.float32) for number in numbers)
    return lr, mu, lr_mu


class Addition(NamedTuple):
    """One delta and what it is added to, of one length each; without `momentum`, to the value alone.

    `is_whole`: with this delta the accumulated weights reach 1; `none_yet`: nothing is accumulated, all zeros.
    """

    value: Vector
    momentum: Vector | None
    accumulated: Vector | None
    delta: Vector
    weight: float
    is_whole: bool
    none_yet: bool

    def fits(self) -> bool:
        """Whether compiled kernels can do it, and it is worth a call of them."""
        if self.momentum is None or self.accumulated is None:
            return kernels.fits(self.delta, self.value)
        return kernels.fits(self.delta, self.value, self.momentum, self.accumulated)


def add_compiled(compiled: kernels.CompiledKernels, to: Addition, rule: Rule) -> None:
    """One pass; the bits are those of `add_in_blocks`."""
    lr, mu = rule.outer_lr, rule.outer_momentum
    if to.momentum is None or to.accumulated is None:
        compiled.add(to.value, to.delta, to.weight, lr)
    elif to.is_whole:
        owed = None if to.none_yet else to.accumulated
        compiled.add_with_momentum(to.value, to.momentum, owed, to.delta, to.weight, lr, mu, lr * mu)
    else:
        compiled.add_and_accumulate(to.value, to.accumulated, to.delta, to.weight, lr)


def add_in_blocks(to: Addition, rule: Rule) -> None:
    """NumPy, block by block, so that the passes over one block find it in the processor's cache."""
    w = np.float32(to.weight)
    lr, mu, lr_mu = _factors(rule)
    step = np.empty(min(BLOCK_VALUES, to.delta.size), dtype=np.float32)
    room = step if to.weight == 1.0 else np.empty_like(step)
    for start in range(0, to.delta.size, BLOCK_VALUES):
        block = slice(start, min(start + BLOCK_VALUES, to.delta.size))
        value, scaled = to.value[block], to.delta[block]
        step = step[: scaled.size]
        if to.weight != 1.0:
            scaled = np.multiply(scaled, w, room[: scaled.size])
        if to.momentum is not None and to.accumulated is not None:
            accumulated = to.accumulated[block]
            if not to.is_whole:
                np.add(accumulated, scaled, accumulated)
            else:
                momentum = to.momentum[block]
                np.multiply(momentum, mu, momentum)
                if to.none_yet:
                    np.add(momentum, scaled, momentum)
                else:
                    np.add(accumulated, scaled, accumulated)
                    np.add(momentum, accumulated, momentum)
                    accumulated[:] = 0.0
                np.add(value, np.multiply(momentum, lr_mu, step), value)
        np.add(value, np.multiply(scaled, lr, step), value)
