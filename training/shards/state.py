"""The state of one shard, and the only arithmetic that changes it.

Value, momentum, accumulated delta, Σw, pending deltas, the set of applied identities and the version move together:
an owner, its backup and a learner each hold one `ShardState` and feed it the same identities, in any order.
Rule: `value += outer_lr · w · delta`, and Delayed Nesterov momentum each time Σw reaches 1 (arXiv 2401.09135,
Algorithm 3; DESIGN section 5). Buffers of the model take `w · delta` and no momentum. Pure.

Under the rule `trimmed-mean` deltas are held like those of a synchronous step, and a window of them is made visible at
once; which ones, the owner says, and its backup does the same (`training.shards.robust`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from training import kernels
from training.encoding.codecs import Vector
from training.shards import robust
from training.shards.applied import Applied, DeltaId
from training.shards.outer_rule import Addition, Rule, add_compiled, add_in_blocks
from training.shards.robust import Norms

#: Σw of N times 1/N may fall short of 1 by rounding.
WHOLE_WEIGHT = 1.0 - 1e-6


@dataclass(slots=True)
class PendingDelta:
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
    pending: dict[int, list[PendingDelta]] = field(default_factory=dict)
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
        to = Addition(
            self.value[: delta.size],
            self.momentum if has_momentum else None,
            self.accumulated if has_momentum else None,
            delta,
            weight,
            is_whole,
            none_yet=self.sum_weight == 0.0,
        )
        if kernels.COMPILED is not None and to.fits():
            add_compiled(kernels.COMPILED, to, rule)
        else:
            add_in_blocks(to, rule)
        if has_momentum:
            self.sum_weight = 0.0 if is_whole else self.sum_weight + weight

    def add_pending(self, identity: DeltaId, weight: float, delta: Vector, *, momentum: bool = True) -> None:
        """Keep a delta until the barrier of its step has passed, or its window is complete."""
        self.pending.setdefault(identity.step, []).append(PendingDelta(identity, weight, delta, momentum))

    def pass_step(self, step: int) -> None:
        """The barrier of a step has passed."""
        self.folded_step = max(self.folded_step, step)

    def fold(self, step: int, rule: Rule) -> int:
        """Make the pending deltas of steps up to `step` visible, in the order of identities; returns how many."""
        self.pass_step(step)
        ready = sorted(number for number in self.pending if number <= step)
        count = 0
        for number in ready:
            for held in sorted(self.pending.pop(number), key=lambda held: held.identity):
                self.apply(held.identity, held.weight, held.delta, rule, momentum=held.momentum)
                count += 1
        return count

    def pending_deltas(self) -> list[PendingDelta]:
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
        window = [held for held in self.pending_deltas() if held.identity in named]
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
