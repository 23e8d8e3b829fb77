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

from p2pnode.overlay.environment import Environment
from p2pnode.training.cooperative import off_loop
from p2pnode.training.exchange.delta import IncomingDelta
from p2pnode.training.exchange.messages import Push, PushResult, RefusalReason
from p2pnode.training.exchange.run_state import Counters, RebalanceRequests, SwarmView
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards import robust
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.delta_range import MAX_LENGTH, is_usual_at_first, longest
from p2pnode.training.shards.robust import FirstNorms, Norms
from p2pnode.training.shards.state import ShardState

#: The weights that owner and origin compute may differ by the lag of their population estimates, not by more.
WEIGHT_FACTOR = 2.0
#: How far a weight by samples may be from the plain share: a quarter to four times the mean.
SAMPLE_FACTOR = 4.0
#: Pending deltas of one node under bulk-synchronous rules; a node that follows the barrier has two at most.
MAX_PENDING_PER_NODE = 16
#: A node is warned of after so many steps with an unusually long delta, each delta that was not taken off.
UNUSUAL_STEPS = 10


@dataclass(eq=False)
class DeltaValidator:
    """Validates the deltas of the shards that one node owns."""

    store: ShardStore
    view: SwarmView
    counters: Counters
    settings: ExchangeSettings
    environment: Environment

    def __post_init__(self) -> None:
        self._first = FirstNorms()
        #: By node, how many steps had an unusually long delta, and the last of them.
        self._unusual: dict[bytes, tuple[int, int]] = {}

    def validate(self, push: Push, identity: DeltaId, item: IncomingDelta) -> PushResult | None:
        """Check the values, and set length and clipping factor of the item; None if it may be added."""
        state, is_clipped = self.store.owned[item.shard].state, bool(self.store.rule.robust)
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
                workers = self.view.worker_count()
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
        if reference is None or not self._has_measure(state.norms):
            if is_usual_at_first(size, norm):
                return None
            reference = self._first.reference(item.shard, identity.node, norm, self.view.worker_count())
            if reference is None:
                return PushResult.retry(item.shard, "no_norms_yet")
        return None if norm <= longest(size, reference) else self.refuse(item.shard, "out_of_range")

    def _has_measure(self, norms: Norms) -> bool:
        """Whether so many members have sent a delta of the shard that one alone does not set the median."""
        return len(norms) >= min(robust.FIRST_MEMBERS, round(self.view.worker_count()))

    def note_added(self, identity: DeltaId, item: IncomingDelta) -> None:
        """Counters and events of a delta that has just been added."""
        norms = self.store.owned[item.shard].state.norms
        if self._has_measure(norms):
            self._first.forget(item.shard)
        self.counters.clipped += item.scale < 1.0
        self.counters.unusual_norms += item.unusual
        if not item.unusual and not self._unusual:
            return
        # Single batches are long near a minimum, and single shards; those of a node that scales its deltas are all.
        steps, last = self._unusual.pop(identity.node, (0, -1))
        steps += identity.step != last if item.unusual else -1
        if steps >= UNUSUAL_STEPS:
            steps = 0
            self.environment.log.warning(
                "delta_norm_unusual",
                source=identity.node.hex()[:8],
                step=identity.step,
                shard=item.shard,
                norm=float(f"{item.norm:.4g}"),
                median=float(f"{norms.reference() or 0.0:.4g}"),
                clipped=item.scale < 1.0,
            )
        if steps > 0 or item.unusual:
            self._unusual[identity.node] = steps, identity.step if item.unusual else last

    def refuse(self, shard: int, reason: RefusalReason) -> PushResult:
        """A final refusal, counted by its reason."""
        counts = self.counters.refused_here
        counts[reason] = counts.get(reason, 0) + 1
        return PushResult.refused(shard, reason)

    def clamp_weight(self, weight: float, workers: float = 0.0, *, repair: bool = False, plain: bool = False) -> float:
        """The weight that the owner adds a delta with, before clipping: corrected to this owner's count, where its
        origin counts fewer `workers`. Plain deltas may weigh √workers times as much as others (`Agreement.rate`), but
        none more than 1."""
        low, high = self._weights()
        if self.settings.weight != "sum":
            weight = self.view.corrected(weight, workers)
        if plain:
            high = max(high, min(1.0, math.sqrt(max(1.0, self.view.worker_count())) * high))
        # A repair was weighed by the estimate of its side of the split, which this owner's may differ from. It has no
        # lower bound: the side may have had many more workers.
        return min(weight, WEIGHT_FACTOR * high) if repair else min(max(weight, low), high)

    def _weights(self) -> tuple[float, float]:
        """The lowest and the highest weight that an honest delta may have here."""
        if self.settings.weight == "sum":
            return 1.0, 1.0
        own = 1.0 / max(1.0, self.view.worker_count())
        factor = WEIGHT_FACTOR * (SAMPLE_FACTOR if self.settings.weight == "samples" else 1.0)
        return own / factor, own * factor


INSPECTION_INTERVAL_S = 1.0


@dataclass(eq=False)
class ShardInspector:
    """The inspections of one node."""

    store: ShardStore
    counters: Counters
    rebalance: RebalanceRequests
    environment: Environment

    async def inspect(self, shards: Iterable[int]) -> None:
        """Look at those of the shards owned here that were not looked at within `INSPECTION_INTERVAL_S`."""
        now_s, due = self.environment.clock.monotonic(), dict[int, ShardState]()
        for shard in shards:
            owned = self.store.owned.get(shard)
            if owned is not None and now_s - owned.state.looked_s >= INSPECTION_INTERVAL_S:
                owned.state.looked_s, due[shard] = now_s, owned.state
        size = sum(state.value.size for state in due.values())
        for shard in await off_loop(self.environment.executor, size, _broken, due):
            if (owned := self.store.owned.get(shard)) is not None and owned.state is due[shard]:
                self.resign(shard)

    def resign(self, shard: int) -> None:
        """Own a shard no more, whose values are broken."""
        self.store.resign(shard)
        self.counters.shards_resigned += 1
        self.environment.log.error("shard_resigned", shard=shard)
        self.rebalance.take_over(shard)  # the ordinary search for the best copy, here without one
        self.rebalance.wake()


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
