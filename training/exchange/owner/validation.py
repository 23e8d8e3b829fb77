"""Promise 7: what an owner adds and what it serves is finite and in range.

A delta is looked at before it is added: finite values, length, weight, and whether its node still has quota. Who owns
the shard, and whether the delta is in already, is decided in `training.exchange.owner.deltas`. A wrong delta is
rejected permanently and counted by its reason; one that comes too early is to be sent again. A long one is clipped
under the rule `clip`, and is worth a warning under every rule.

No accepted delta makes the values of a shard wrong. Memory, a driver or a kernel may. A shard that is served is looked
at, if that was not done within `INSPECTION_INTERVAL_S`. The addition of a delta is such a look too
(`ShardState.note_addition`): a shard that trains is not read once more. A node resigns a broken shard, as by a crash:
it drops the state, and the backup takes over. A backup drops a broken copy, and its owner sends the state again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from overlay.environment import Environment
from training.cooperative import LoopYielder, off_loop
from training.exchange.context import Counters
from training.exchange.jobs import RebalanceRequests
from training.exchange.messages import Push, PushResult, RefusalReason
from training.exchange.owner.delta_item import IncomingDelta
from training.exchange.store.shard_store import ShardStore
from training.exchange.swarm_view import SwarmView
from training.settings import ExchangeSettings
from training.shards import robust
from training.shards.applied import DeltaId
from training.shards.delta_range import MAX_LENGTH, is_usual_at_first, longest
from training.shards.robust import FirstNorms
from training.shards.state import ShardState

#: The weights that owner and origin compute may differ by the lag of their population estimates, not by more.
WEIGHT_FACTOR = 2.0
#: How far a weight by samples may be from the plain share: a quarter to four times the mean.
SAMPLE_FACTOR = 4.0
#: The largest `exchange.sparse_lr`, which the origin multiplies the weight of a sparse delta by.
SPARSE_FACTOR = 4.0
#: Pending deltas of one node under bulk-synchronous rules; a node that follows the barrier has two at most.
MAX_PENDING_PER_NODE = 16
#: A node is warned of when at least half of its deltas were unusually long in each of so many steps in a row. Near a
#: minimum single batches are: of 30,000 deltas of the digits 38 were, a minority of each step; those of one that scales
#: its deltas are in all.
UNUSUAL_STEPS = 5
#: Seconds between two warnings about unusual lengths of one node; all are counted.
UNUSUAL_WARNING_INTERVAL_S = 60.0
#: Nodes whose last warning is remembered.
MAX_WARNED_NODES = 1024


@dataclass(slots=True)
class _Lengths:
    """The deltas of a node's present step that were added here, and how many steps in a row before it were unusual."""

    step: tuple[int, int] = (0, 0)
    deltas: int = 0
    unusual: int = 0
    run: int = 0

    @property
    def is_unusual(self) -> bool:
        return self.unusual > 0 and 2 * self.unusual >= self.deltas


class DeltaValidator:
    """Validates the deltas of the shards that one node owns."""

    def __init__(
        self,
        store: ShardStore,
        view: SwarmView,
        counters: Counters,
        settings: ExchangeSettings,
        environment: Environment,
    ) -> None:
        self._store = store
        self._view = view
        self._counters = counters
        self._settings = settings
        self._clock = environment.clock
        self._log = environment.log
        self._first = FirstNorms()
        self._warned_s: dict[bytes, float] = {}
        self._lengths: dict[bytes, _Lengths] = {}

    def validate(self, push: Push, identity: DeltaId, item: IncomingDelta) -> PushResult | None:
        """Check the values, and set length and clipping factor of the item; None if it may be added."""
        state, is_clipped = self._store.owned[item.shard].state, bool(self._store.rule.robust)
        if item.norm is None:
            item.norm = robust.norm_of(item.delta)
        if not math.isfinite(item.norm):
            return self.refuse(item.shard, "not_finite")
        if (wrong := self._out_of_range(identity, item, state)) is not None:
            return wrong
        reference = state.norms.reference()
        item.unusual = not item.repair and robust.is_unusual(item.norm, reference, len(state.norms))
        if item.repair:
            if is_clipped and reference is not None:
                # At most as long as a push may be: of a repair only the identities are taken on trust.
                high = self._weights()[1]
                item.scale = robust.clip_factor(item.norm * push.weight / high, reference)
            return None
        mine = sum(pending.identity.node == identity.node for pending in state.pending_deltas())
        if mine >= MAX_PENDING_PER_NODE:
            return PushResult.retry(item.shard, "too_many_pending")
        if is_clipped:
            if reference is None:
                workers = self._view.worker_count()
                reference = self._first.reference(item.shard, identity.node, item.norm, workers)
                if reference is None:
                    return PushResult.retry(item.shard, "no_norms_yet")
            item.scale = robust.clip_factor(item.norm, reference)
        return None

    def _out_of_range(self, identity: DeltaId, item: IncomingDelta, state: ShardState) -> PushResult | None:
        """Whether the delta would leave the range in which training lives, by what the members have sent so far.

        While too few have sent one, a long delta waits for the others: one member alone must not set the measure.
        """
        norm, size = item.norm or 0.0, item.delta.size
        reference = state.norms.reference()
        if norm > MAX_LENGTH:
            return self.refuse(item.shard, "out_of_range")
        if reference is None or not self._has_measure(state):
            if is_usual_at_first(size, norm):
                return None
            reference = self._first.reference(item.shard, identity.node, norm, self._view.worker_count())
            if reference is None:
                return PushResult.retry(item.shard, "no_norms_yet")
        return None if norm <= longest(size, reference) else self.refuse(item.shard, "out_of_range")

    def _has_measure(self, state: ShardState) -> bool:
        """Whether so many members have sent a delta of the shard that one alone does not set the median."""
        return len(state.norms) >= min(robust.FIRST_MEMBERS, round(self._view.worker_count()))

    def note_added(self, identity: DeltaId, item: IncomingDelta) -> None:
        """Counters and events of a delta that has just been added."""
        if self._has_measure(self._store.owned[item.shard].state):
            self._first.forget(item.shard)
        counters, now = self._counters, self._clock.monotonic()
        counters.clipped += item.scale < 1.0
        counters.unusual_norms += item.unusual
        if not self._is_persistent(identity, unusual=item.unusual) or not item.unusual:
            return
        warned_s = self._warned_s.get(identity.node)
        if warned_s is not None and now - warned_s < UNUSUAL_WARNING_INTERVAL_S:
            return
        self._warned_s.pop(identity.node, None)
        if len(self._warned_s) >= MAX_WARNED_NODES:
            del self._warned_s[next(iter(self._warned_s))]
        self._warned_s[identity.node] = now
        median = self._store.owned[item.shard].state.norms.reference() or 0.0
        self._log.warning(
            "delta_norm_unusual",
            source=identity.node.hex()[:8],
            step=identity.step,
            shard=item.shard,
            norm=float(f"{item.norm:.4g}"),
            median=float(f"{median:.4g}"),
            clipped=item.scale < 1.0,
        )

    def _is_persistent(self, identity: DeltaId, *, unusual: bool) -> bool:
        """Whether the deltas of a node were unusually long for several steps in a row, the present one included."""
        lengths = self._lengths.get(identity.node)
        if lengths is None:
            if not unusual:
                return False
            if len(self._lengths) >= MAX_WARNED_NODES:
                del self._lengths[next(iter(self._lengths))]
            lengths = self._lengths[identity.node] = _Lengths()
        if (identity.incarnation, identity.step) != lengths.step:
            lengths.run = lengths.run + 1 if lengths.is_unusual else 0
            lengths.step, lengths.deltas, lengths.unusual = (identity.incarnation, identity.step), 0, 0
        lengths.deltas += 1
        lengths.unusual += unusual
        return lengths.is_unusual and lengths.run + 1 >= UNUSUAL_STEPS

    def refuse(self, shard: int, reason: RefusalReason) -> PushResult:
        """A final refusal, counted by its reason."""
        counts = self._counters.refused_here
        counts[reason] = counts.get(reason, 0) + 1
        return PushResult.refused(shard, reason)

    def clamp_weight(self, weight: float, workers: float = 0.0, *, repair: bool = False, plain: bool = False) -> float:
        """The weight that the owner adds a delta with, before clipping: corrected to this owner's count, where its
        origin counts fewer `workers`. Plain deltas may weigh `SPARSE_FACTOR` times as much as others, but none more
        than 1."""
        low, high = self._weights()
        if self._settings.weight != "sum":
            weight = self._view.corrected(weight, workers)
        if plain:
            high = max(high, min(1.0, SPARSE_FACTOR * high))
        # A repair was weighed by the estimate of its side of the split, which this owner's may differ from. It has no
        # lower bound: the side may have had many more workers.
        return min(weight, WEIGHT_FACTOR * high) if repair else min(max(weight, low), high)

    def _weights(self) -> tuple[float, float]:
        """The lowest and the highest weight that an honest delta may have here."""
        if self._settings.weight == "sum":
            return 1.0, 1.0
        own = 1.0 / max(1.0, self._view.worker_count())
        factor = WEIGHT_FACTOR * (SAMPLE_FACTOR if self._settings.weight == "samples" else 1.0)
        return own / factor, own * factor


INSPECTION_INTERVAL_S = 1.0
#: A thread looks at so many values, or one shard: the way to it and back costs as much as this pass.
VALUES_AT_ONCE = 1 << 20


class ShardInspector:
    """The inspections of one node."""

    def __init__(
        self, store: ShardStore, counters: Counters, rebalance: RebalanceRequests, environment: Environment
    ) -> None:
        self._store = store
        self._counters = counters
        self._rebalance = rebalance
        self._clock = environment.clock
        self._executor = environment.executor
        self._log = environment.log

    async def inspect(self, shards: Iterable[int]) -> None:
        """Look at those of the shards owned here that were not looked at within `INSPECTION_INTERVAL_S`."""
        turn, left = LoopYielder(), list(shards)
        while left:
            some: dict[int, ShardState] = {}
            size, now_s = 0, self._clock.monotonic()
            while left and size < VALUES_AT_ONCE:
                owned = self._store.owned.get(shard := left.pop(0))
                if (
                    owned is not None
                    and owned.state.value.size
                    and now_s - owned.state.looked_s >= INSPECTION_INTERVAL_S
                ):
                    owned.state.looked_s, some[shard] = now_s, owned.state
                    size += owned.state.value.size
            for shard in await off_loop(self._executor, size, _broken, some):
                if (owned := self._store.owned.get(shard)) is not None and owned.state is some[shard]:
                    self.resign(shard)
            await turn.after(size)

    def resign(self, shard: int) -> None:
        """Own a shard no more, whose values are broken."""
        self._store.resign(shard)
        self._counters.resigned_shards += 1
        self._log.error("shard_resigned", shard=shard)
        self._rebalance.take_over(shard)  # the ordinary search for the best copy, here without one
        self._rebalance.wake()


def is_good(state: ShardState, now_s: float) -> bool:
    """Whether the values of a backup's copy, to which a delta may have been added now, are in range: they are looked at
    once in `INSPECTION_INTERVAL_S`, unless the addition was such a look."""
    state.note_addition(now_s)
    if now_s - state.looked_s < INSPECTION_INTERVAL_S:
        return True
    state.looked_s = now_s
    return state.is_in_range()


def _broken(states: Mapping[int, ShardState]) -> list[int]:
    return [shard for shard, state in states.items() if not state.is_in_range()]
