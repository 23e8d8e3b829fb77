"""The outer rule: the arithmetic by which a delta changes value and momentum of a shard. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from p2pnode.training import kernels
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.encoding.table import CODECS, CodecName
from p2pnode.training.shards.robust import Robust

#: Values per block: six arrays of this many float32 fit a core's second-level cache.
BLOCK_VALUES = 32768


class Rule(msgspec.Struct, frozen=True):
    """The outer rule, shared by the swarm (in the manifest)."""

    outer_lr: float
    outer_momentum: float
    robust: Robust = ""


#: Adding 0 turns -0 into 0: so does the compiled pass, and both give the same bits.
_NOTHING = np.zeros((), dtype=np.float32)

#: The bits of a float32 without its sign.
_MAGNITUDE = np.uint32(0x7FFFFFFF)

#: The rule for deltas that are plain: `value += w · delta`.
PLAIN = Rule(outer_lr=1.0, outer_momentum=0.0)


def is_plain(codec: CodecName) -> bool:
    """Whether deltas in this codec are added as they are, by `PLAIN`.

    A partial delta is: what it lacks follows by the sender's error feedback, which acts as a momentum already, and a
    second one diverges from the first (SparseLoCo, arXiv 2508.15706). Owner, backup and every later reader decide it
    by the codec of the frame, so that all compute the same bits.
    """
    return CODECS[codec].is_partial


@lru_cache(maxsize=4)
def _factors(rule: Rule) -> tuple[Vector, Vector, Vector]:
    """outer_lr, outer_momentum and their product as arrays without dimensions. On the shards of a small model NumPy
    takes longer to convert a Python number than to multiply by it."""
    numbers = (rule.outer_lr, rule.outer_momentum, rule.outer_lr * rule.outer_momentum)
    lr, mu, lr_mu = (np.array(number, dtype=np.float32) for number in numbers)
    return lr, mu, lr_mu


class Addition(NamedTuple):
    """A delta and the arrays it is added to, all of one length; without `momentum` it changes the value alone.

    `begins`: the delta is the first of a round, before which the momentum decays. `is_whole`: with it the sum of the
    weights reaches 1, and the momentum moves the value. In between the momentum takes what is added.
    """

    value: Vector
    momentum: Vector | None
    delta: Vector
    weight: float
    is_whole: bool
    begins: bool

    def fits(self) -> bool:
        """Whether the compiled kernels support these arrays, and their size is worth the call."""
        if self.momentum is None:
            return kernels.fits(self.delta, self.value)
        return kernels.fits(self.delta, self.value, self.momentum)


def add_compiled(compiled: kernels.CompiledKernels, to: Addition, rule: Rule) -> int:
    """Add in one pass; value, momentum and result are those of `add_in_blocks`, bit for bit."""
    lr, mu = rule.outer_lr, rule.outer_momentum
    if to.momentum is None:
        return compiled.add(to.value, to.delta, to.weight, lr)
    if to.begins or to.is_whole:
        decay, moves = mu if to.begins else 1.0, lr * mu if to.is_whole else 0.0
        return compiled.add_with_momentum(to.value, to.momentum, to.delta, to.weight, lr, decay, moves)
    return compiled.add_and_accumulate(to.value, to.momentum, to.delta, to.weight, lr)


def add_in_blocks(to: Addition, rule: Rule) -> int:
    """Add with NumPy, block by block, so that all passes over a block find it in the processor's cache.

    Returns the largest magnitude of what was written to value and momentum, as the bits of a float32 without its sign:
    they are ordered like the numbers, then infinity, then NaN.
    """
    largest = 0
    w = np.float32(to.weight)
    lr, mu, lr_mu = _factors(rule)
    step = np.empty(min(BLOCK_VALUES, to.delta.size), dtype=np.float32)
    scratch = step if to.weight == 1.0 else np.empty_like(step)
    for start in range(0, to.delta.size, BLOCK_VALUES):
        block = slice(start, min(start + BLOCK_VALUES, to.delta.size))
        value, scaled = to.value[block], to.delta[block]
        step = step[: scaled.size]
        if to.weight != 1.0:
            scaled = np.multiply(scaled, w, scratch[: scaled.size])
        if to.momentum is not None:
            momentum = to.momentum[block]
            if to.begins:
                np.multiply(momentum, mu, momentum)
            np.add(momentum, scaled, momentum)
            if to.begins or to.is_whole:
                np.add(value, np.multiply(momentum, lr_mu if to.is_whole else _NOTHING, step), value)
        np.add(value, np.multiply(scaled, lr, step), value)
        largest = max(largest, _largest(value), 0 if to.momentum is None else _largest(momentum))
    return largest


def _largest(values: Vector) -> int:
    return int((values.view(np.uint32) & _MAGNITUDE).max())
