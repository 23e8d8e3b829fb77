"""The state of one shard, and the only arithmetic that changes it.

Value, momentum, accumulated delta, Σw, pending deltas, the set of applied identities and the version move together:
an owner, its backup and a learner each hold one `ShardState` and feed it the same identities, in any order.
Rule: `value += outer_lr · w · delta`, and Delayed Nesterov momentum each time Σw reaches 1 (arXiv 2401.09135,
Algorithm 3; DESIGN section 5). Buffers of the model take `w · delta` and no momentum. Pure.

Under the rule `trimmed-mean` deltas are held like those of a synchronous step, and a window of them is made visible at
once; which ones, the owner says, and its backup does the same (`training.shards.robust`).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from training import kernels
from training.encoding.codecs import Vector
from training.shards import robust
from training.shards.robust import Norms, Robust

#: Σw of N times 1/N may fall short of 1 by rounding.
WHOLE_WEIGHT = 1.0 - 1e-6
#: Values worked on at a time: six arrays of this many float32 fit a core's second cache.
BLOCK_VALUES = 32768


class DeltaId(NamedTuple):
    """The identity of a delta: applied once, however often it is sent."""

    node: bytes
    incarnation: int
    step: int


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


class _Addition(NamedTuple):
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


def _add_compiled(compiled: kernels.Compiled, to: _Addition, rule: Rule) -> None:
    """One pass; the bits are those of `_add_in_blocks`."""
    lr, mu = rule.outer_lr, rule.outer_momentum
    if to.momentum is None or to.accumulated is None:
        compiled.add(to.value, to.delta, to.weight, lr)
    elif to.is_whole:
        owed = None if to.none_yet else to.accumulated
        compiled.add_with_momentum(to.value, to.momentum, owed, to.delta, to.weight, lr, mu, lr * mu)
    else:
        compiled.add_and_accumulate(to.value, to.accumulated, to.delta, to.weight, lr)


def _add_in_blocks(to: _Addition, rule: Rule) -> None:
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


class Applied:
    """Which identities are in: per (node, incarnation) a few disjoint ranges of steps.

    Ranges, because after a split a node's step 6 may be here and its step 5 not. Beyond `MOST_RANGES` the lowest gap
    is closed: a delta that old is refused as late long before.
    """

    MOST_RANGES = 32
    #: Incarnations of one node; beyond, the lowest is forgotten: whoever started so often since pushes it no more.
    MOST_INCARNATIONS = 64

    def __init__(self, ranges: dict[tuple[bytes, int], list[tuple[int, int]]] | None = None) -> None:
        self._ranges = ranges if ranges is not None else {}

    def __contains__(self, identity: DeltaId) -> bool:
        ranges = self._ranges.get((identity.node, identity.incarnation))
        if not ranges:
            return False
        if identity.step > ranges[-1][1]:  # nearly always: the next step of its node
            return False
        place = bisect_right(ranges, (identity.step, identity.step)) - 1
        if place >= 0 and ranges[place][0] <= identity.step <= ranges[place][1]:
            return True
        following = place + 1
        return following < len(ranges) and ranges[following][0] <= identity.step <= ranges[following][1]

    def add(self, identity: DeltaId) -> None:
        """Note an identity; a second time changes nothing."""
        ranges = self._ranges.get((identity.node, identity.incarnation))
        if ranges is None:
            ranges = self._ranges[identity.node, identity.incarnation] = []
            starts = sorted(incarnation for node, incarnation in self._ranges if node == identity.node)
            for incarnation in starts[: -self.MOST_INCARNATIONS]:
                del self._ranges[identity.node, incarnation]
        if ranges and identity.step == ranges[-1][1] + 1:  # nearly always
            ranges[-1] = (ranges[-1][0], identity.step)
            return
        if identity in self:
            return
        insort(ranges, (identity.step, identity.step))
        merged: list[tuple[int, int]] = []
        for low, high in ranges:
            if merged and low <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(merged[-1][1], high))
            else:
                merged.append((low, high))
        while len(merged) > self.MOST_RANGES:
            merged[:2] = [(merged[0][0], merged[1][1])]
        ranges[:] = merged

    def forget(self, node: bytes, incarnation: int) -> None:
        """Drop an incarnation that is long dead."""
        self._ranges.pop((node, incarnation), None)

    def copy(self) -> Applied:
        return Applied({key: list(ranges) for key, ranges in self._ranges.items()})

    def without(self, other: Applied) -> Applied:
        """The identities that are here and not there."""
        left: dict[tuple[bytes, int], list[tuple[int, int]]] = {}
        for key, ranges in self._ranges.items():
            rest = list(ranges)
            for low, high in other._ranges.get(key, ()):
                cut = [((a, min(b, low - 1)), (max(a, high + 1), b)) for a, b in rest]
                rest = [piece for pieces in cut for piece in dict.fromkeys(pieces) if piece[0] <= piece[1]]
            if rest:
                left[key] = rest
        return Applied(left)

    def merge(self, other: Applied) -> None:
        """Note all identities that are there."""
        for key, theirs in other._ranges.items():
            merged: list[tuple[int, int]] = []
            for low, high in sorted([*self._ranges.get(key, ()), *theirs]):
                if merged and low <= merged[-1][1] + 1:
                    merged[-1] = (merged[-1][0], max(merged[-1][1], high))
                else:
                    merged.append((low, high))
            self._ranges[key] = merged

    def rows(self) -> list[tuple[bytes, int, list[tuple[int, int]]]]:
        """As plain data, for the wire."""
        return [(node, incarnation, list(ranges)) for (node, incarnation), ranges in self._ranges.items()]

    @classmethod
    def of_rows(cls, rows: list[tuple[bytes, int, list[tuple[int, int]]]]) -> Applied:
        return cls({(node, incarnation): [(a, b) for a, b in ranges] for node, incarnation, ranges in rows})


@dataclass(slots=True)
class Held:
    """A delta under bulk-synchronous rules: acknowledged, not yet visible."""

    identity: DeltaId
    weight: float
    delta: Vector
    momentum: bool = True


@dataclass(slots=True)
class ShardState:
    """One shard: `value` is float32[n]; its first `parameters` values are parameters, the rest buffers."""

    value: Vector
    parameters: int
    momentum: Vector | None = None
    accumulated: Vector | None = None
    sum_weight: float = 0.0
    version: int = 0
    #: After a take-over from a replica nobody knows which older deltas are in: those with an older base are refused.
    era_step: int = 0
    #: The term of the replica that the era began with: a copy of that term or a later one has all that it had.
    era_term: tuple[int, bytes] = (0, b"")
    applied: Applied = field(default_factory=Applied)
    pending: dict[int, list[Held]] = field(default_factory=dict)
    folded_step: int = 0
    #: Lengths of the deltas added, by member: what clipping goes by.
    norms: Norms = field(default_factory=Norms)

    def knows(self, identity: DeltaId) -> bool:
        """Whether the delta is in the value or held for its step."""
        if identity in self.applied:
            return True
        return bool(self.pending) and any(held.identity == identity for held in self.pending.get(identity.step, ()))

    def apply(self, identity: DeltaId, weight: float, delta: Vector, rule: Rule, *, momentum: bool = True) -> None:
        """Add one delta, `float32[n]`, with its weight. The caller has checked that it is not known.

        Without `momentum` for one that comes late out of a split: its direction is that of long ago.
        """
        self.applied.add(identity)
        self.version += 1
        split = self.parameters
        if split:
            self._add_parameters(weight, delta[:split], rule, has_momentum=momentum and rule.outer_momentum != 0.0)
        if split < self.value.size:
            self.value[split:] += delta[split:] * np.float32(weight)

    def _add_parameters(self, weight: float, delta: Vector, rule: Rule, *, has_momentum: bool) -> None:
        """Add to the first `parameters` values, by compiled kernels where there are any."""
        if has_momentum and (self.momentum is None or self.accumulated is None):
            self.momentum = np.zeros(self.parameters, dtype=np.float32)
            self.accumulated = np.zeros(self.parameters, dtype=np.float32)
        is_whole = self.sum_weight + weight >= WHOLE_WEIGHT
        to = _Addition(
            self.value[: delta.size],
            self.momentum if has_momentum else None,
            self.accumulated if has_momentum else None,
            delta,
            weight,
            is_whole,
            none_yet=self.sum_weight == 0.0,
        )
        if kernels.COMPILED is not None and to.fits():
            _add_compiled(kernels.COMPILED, to, rule)
        else:
            _add_in_blocks(to, rule)
        if has_momentum:
            self.sum_weight = 0.0 if is_whole else self.sum_weight + weight

    def hold(self, identity: DeltaId, weight: float, delta: Vector, *, momentum: bool = True) -> None:
        """Keep a delta until the barrier of its step has passed, or its window is complete."""
        self.pending.setdefault(identity.step, []).append(Held(identity, weight, delta, momentum))

    def fold(self, step: int, rule: Rule) -> int:
        """Make the held deltas of steps up to `step` visible, in the order of their identities; returns how many."""
        self.folded_step = max(self.folded_step, step)
        ready = sorted(number for number in self.pending if number <= step)
        count = 0
        for number in ready:
            for held in sorted(self.pending.pop(number), key=lambda held: held.identity):
                self.apply(held.identity, held.weight, held.delta, rule, momentum=held.momentum)
                count += 1
        return count

    def held(self) -> list[Held]:
        """What is acknowledged and not yet visible, in the order of identities."""
        return sorted((held for items in self.pending.values() for held in items), key=lambda held: held.identity)

    def close(self, identities: Sequence[DeltaId], rule: Rule) -> bool:
        """Make a window of held deltas visible as their trimmed mean; False, and nothing is done, when one of them is
        not here. A window that is in already is left alone.

        One row per node: the weighted sum of its deltas, in the order of their identities.
        """
        if all(identity in self.applied for identity in identities):
            return True
        named = dict.fromkeys(identities)
        window = [held for held in self.held() if held.identity in named]
        if len(window) != len(named):
            return False
        rows: dict[bytes, Vector] = {}
        for held in window:
            part = held.delta * np.float32(held.weight)
            row = rows.get(held.identity.node)
            rows[held.identity.node] = part if row is None else row + part
        weight = sum(held.weight for held in window)
        total = np.empty_like(self.value)
        robust.trimmed_sum(list(rows.values()), total)
        total /= np.float32(weight)
        momentum = all(held.momentum for held in window)
        self.apply(window[0].identity, weight, total, rule, momentum=momentum)
        for held in window[1:]:
            self.applied.add(held.identity)
            self.version += 1
        for step in {identity.step: None for identity in named}:
            rest = [held for held in self.pending[step] if held.identity not in named]
            if rest:
                self.pending[step] = rest
            else:
                del self.pending[step]
        return True

    @property
    def known_count(self) -> int:
        """Number of deltas in the value or held: equal for two states of one shard exactly when none lacks one that
        the other has, as long as one of them has all of the other's."""
        return self.version + sum(len(held) for held in self.pending.values())

    def copy(self) -> ShardState:
        """An independent state: the snapshot a learner gets."""
        return ShardState(
            value=self.value.copy(),
            parameters=self.parameters,
            momentum=None if self.momentum is None else self.momentum.copy(),
            accumulated=None if self.accumulated is None else self.accumulated.copy(),
            sum_weight=self.sum_weight,
            version=self.version,
            era_step=self.era_step,
            era_term=self.era_term,
            applied=self.applied.copy(),
            pending={step: list(held) for step, held in self.pending.items()},
            folded_step=self.folded_step,
            norms=self.norms.copy(),
        )

    @property
    def size_bytes(self) -> int:
        """Memory of the arrays."""
        arrays = [self.value, self.momentum, self.accumulated]
        held = sum(item.delta.nbytes for items in self.pending.values() for item in items)
        return sum(array.nbytes for array in arrays if array is not None) + held
