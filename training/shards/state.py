"""The state of one shard, and the only arithmetic that changes it.

Value, momentum, Σw, pending deltas, applied identities and version change together. The owner, its backup and a learner
each have one `ShardState` and add the same identities to it, in any order. The rule is `value += outer_lr · w · delta`,
with Delayed Nesterov momentum each time Σw reaches 1 (arXiv 2401.09135, Algorithm 3). The sum of the deltas of a round
needs no array of its own: the momentum decays when the round begins, takes each delta at once, and is read at its end.
Buffers of the model take `w · delta` and no momentum, and so does the whole shard for a plain delta
(`training.shards.outer_rule.is_plain`). Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from p2pnode.training import kernels
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.shards.applied import Applied, DeltaId
from p2pnode.training.shards.delta_range import MAX_STATE_LENGTH, has_length, is_delta_in_range, surely_short
from p2pnode.training.shards.outer_rule import PLAIN, Addition, Rule, add_compiled, add_in_blocks
from p2pnode.training.shards.robust import Norms
from p2pnode.training.shards.value_batch import ValueBatch
from p2pnode.training.shards.value_table import ValueTable

#: Σw of N times 1/N may fall short of 1 by rounding.
WHOLE_WEIGHT = 1.0 - 1e-6


@dataclass(slots=True)
class PendingDelta:
    """A delta that is acknowledged but not yet visible: its step is not complete."""

    identity: DeltaId
    weight: float
    delta: Vector
    momentum: bool = True
    plain: bool = False


@dataclass(slots=True)
class ShardState:
    """One shard: `value` is float32[n]; its first `parameters` values are parameters, the rest buffers.

    `momentum` is float32[parameters]: m while `sum_weight` is 0, and μ · m + Σ w · delta within a round.
    """

    value: Vector
    parameters: int
    momentum: Vector | None = None
    sum_weight: float = 0.0
    version: int = 0
    #: The step at which a take-over from a replica began a new era. Which older deltas that replica had is unknown, so
    #: those with an older base are refused. 0: the state has the whole history.
    era_step: int = 0
    #: The term of the replica that the era began with: a copy of that term or a later one lacks nothing of it.
    era_term: tuple[int, bytes] = (0, b"")
    applied: Applied = field(default_factory=Applied)
    pending: dict[int, list[PendingDelta]] = field(default_factory=dict)
    folded_step: int = 0
    #: Lengths of the added deltas, by member: the reference for clipping.
    norms: Norms = field(default_factory=Norms)
    #: How many deltas the value has that are not in `applied`, because it began as a replica.
    unlisted: int = 0
    #: The named values, in a run without a model: the vector has no values then, and batches take the place of deltas.
    table: ValueTable | None = None
    #: When all of its values were last found to be in range, in monotonic seconds; see `ShardInspector`.
    looked_s: float = -math.inf
    #: The version whose values the addition that made it has found to be in range, all of them; -1: none.
    sound_version: int = -1

    def knows(self, identity: DeltaId) -> bool:
        """Whether the delta is in the value, or pending."""
        if identity in self.applied:
            return True
        return bool(self.pending) and any(one.identity == identity for one in self.pending.get(identity.step, ()))

    def apply(
        self,
        identity: DeltaId,
        weight: float,
        delta: Vector,
        rule: Rule,
        *,
        momentum: bool = True,
        plain: bool = False,
    ) -> None:
        """Add one delta, `float32[n]`, with its weight. The caller has checked that it is not known.

        Without `momentum` for a delta from the other side of a split: its direction is out of date. A `plain` one is
        added with rate 1 and neither counts in Σw nor moves the momentum.
        """
        self.applied.add(identity)
        self.version += 1
        if plain:
            rule = PLAIN
        split, is_sound = self.parameters, True
        if split:
            has_momentum = momentum and rule.outer_momentum != 0.0
            is_sound = self._add_parameters(weight, delta[:split], rule, has_momentum=has_momentum)
        if split < self.value.size:
            self.value[split:] += delta[split:] * np.float32(weight)
            is_sound = is_sound and has_length(self.value[split:], MAX_STATE_LENGTH / 2)
        self.sound_version = self.version if is_sound else -1

    def apply_batch(self, identity: DeltaId, batch: ValueBatch) -> None:
        """Take over a batch of named values. The caller has checked that it is not known, and that there is a table."""
        assert self.table is not None
        self.applied.add(identity)
        self.version += 1
        self.table.apply(batch)

    def note_addition(self, now_s: float) -> None:
        """A delta may have been added now. Where its pass has found all values in range, nobody else need look."""
        if self.sound_version == self.version:
            self.looked_s, self.sound_version = now_s, -1

    def _add_parameters(self, weight: float, delta: Vector, rule: Rule, *, has_momentum: bool) -> bool:
        """Add to the first `parameters` values, by compiled kernels if they are available. Returns whether these and
        their momentum are known to be in range: the pass sees what it writes."""
        # Nothing of weight 0 begins a round: it would leave Σw at 0, and the next delta would begin it again.
        has_momentum = has_momentum and weight != 0.0
        if has_momentum and self.momentum is None:
            self.momentum = np.zeros(self.parameters, dtype=np.float32)
        is_whole = self.sum_weight + weight >= WHOLE_WEIGHT
        to = Addition(
            self.value[: delta.size],
            self.momentum if has_momentum else None,
            delta,
            weight,
            is_whole,
            begins=self.sum_weight == 0.0,
        )
        if kernels.COMPILED is not None and to.fits():
            largest = add_compiled(kernels.COMPILED, to, rule)
        else:
            largest = add_in_blocks(to, rule)
        if has_momentum:
            self.sum_weight = 0.0 if is_whole else self.sum_weight + weight
        return largest <= surely_short(self.value.size) and (has_momentum or self.momentum is None)

    def add_pending(
        self, identity: DeltaId, weight: float, delta: Vector, *, momentum: bool = True, plain: bool = False
    ) -> None:
        """Keep a delta until the barrier of its step has passed."""
        self.pending.setdefault(identity.step, []).append(PendingDelta(identity, weight, delta, momentum, plain))

    def fold(self, step: int, rule: Rule) -> int:
        """Make the pending deltas of steps up to `step` visible, in the order of identities; returns how many."""
        self.folded_step = max(self.folded_step, step)
        ready = sorted(number for number in self.pending if number <= step)
        count = 0
        for number in ready:
            for one in sorted(self.pending.pop(number), key=lambda one: one.identity):
                self.apply(one.identity, one.weight, one.delta, rule, momentum=one.momentum, plain=one.plain)
                count += 1
        return count

    def pending_deltas(self) -> list[PendingDelta]:
        """The deltas that are acknowledged but not yet visible, in the order of identities."""
        return sorted((one for items in self.pending.values() for one in items), key=lambda one: one.identity)

    @property
    def known_count(self) -> int:
        """Number of deltas in the value or pending. If one state has all deltas of another, equal numbers show that
        the other lacks none either."""
        return self.version + sum(len(items) for items in self.pending.values())

    def copy(self) -> ShardState:
        """An independent state: the snapshot for a learner."""
        found = self.unfilled_copy()
        found.fill_from(self)
        return found

    def unfilled_copy(self) -> ShardState:
        """A copy of everything but the arrays, which have the right sizes and any values; `fill_from` copies those."""
        return ShardState(
            value=np.empty_like(self.value),
            parameters=self.parameters,
            momentum=None if self.momentum is None else np.empty_like(self.momentum),
            sum_weight=self.sum_weight,
            version=self.version,
            era_step=self.era_step,
            era_term=self.era_term,
            applied=self.applied.copy(),
            pending={step: list(items) for step, items in self.pending.items()},
            folded_step=self.folded_step,
            norms=self.norms.copy(),
            unlisted=self.unlisted,
            table=None if self.table is None else self.table.copy(),
        )

    def fill_from(self, other: ShardState) -> None:
        """Copy the arrays of the state that this is the `unfilled_copy` of. It releases the GIL, and the other state
        may change meanwhile: then `is_copy_of` is false, and the copy is of no use."""
        np.copyto(self.value, other.value)
        if self.momentum is not None and other.momentum is not None:
            np.copyto(self.momentum, other.momentum)

    def is_copy_of(self, other: ShardState) -> bool:
        """Whether the other state is as it was when it was copied: whatever changes its arrays changes its version."""
        return self.version == other.version

    def is_in_range(self) -> bool:
        """Whether every value is finite, and so are the sums that it may be part of."""
        arrays = [self.value, *([] if self.momentum is None else [self.momentum])]
        pending = (item.delta for item in self.pending_deltas())
        return all(has_length(one, MAX_STATE_LENGTH) for one in arrays) and all(map(is_delta_in_range, pending))

    @property
    def size_bytes(self) -> int:
        """Memory of the arrays."""
        arrays = [self.value, self.momentum]
        pending = sum(item.delta.nbytes for items in self.pending.values() for item in items)
        pending += 0 if self.table is None else self.table.size_bytes
        return sum(array.nbytes for array in arrays if array is not None) + pending


def last_steps(state: ShardState) -> dict[bytes, int]:
    """By node the last step whose delta is in a state, visible or pending; of nodes that it lists."""
    found: dict[bytes, int] = {}
    pending = ((one.identity.node, one.identity.step) for one in state.pending_deltas())
    for node, step in (*((node, ranges[-1][1]) for node, _, ranges in state.applied.rows()), *pending):
        found[node] = max(step, found.get(node, 0))
    return found
