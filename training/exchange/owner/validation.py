"""What an owner thinks of a delta before it takes it: values, length, weight, and how many more of its node wait.

Decides nothing about who owns or who has it already; that is `exchange.serving`. What is wrong is refused for good and
counted by its reason, what comes too early is to be tried again, and what is merely long is weighed less (under the
rule `clip`) or is worth a warning. (DESIGN section 5, promise 8)
"""

from __future__ import annotations

import math

from training.exchange.context import ExchangeContext
from training.exchange.messages import Push, PushResult
from training.exchange.owner.delta_item import IncomingDelta
from training.shards import robust
from training.shards.applied import DeltaId
from training.shards.robust import FirstNorms

#: An owner's weight and an origin's may differ by the lag of their population estimates, not by more.
WEIGHT_FACTOR = 2.0
#: How far a weight by samples may lie from the plain share (DESIGN section 5: ¼…4 of the mean).
SAMPLE_FACTOR = 4.0
#: Deltas of one node held for barriers to come; one that follows the barrier has two at most.
MOST_HELD_OF_ONE = 16
#: A node's unusual lengths are said this often at most; all are counted.
UNUSUAL_S = 60.0
#: Nodes of which it is remembered when that was said.
MOST_SAID = 1024


class DeltaValidator:
    """The judge of one node's shards."""

    def __init__(self, context: ExchangeContext) -> None:
        self._context = context
        self._store = context.store
        self._view = context.view
        self._counters = context.counters
        self._clock = context.environment.clock
        self._log = context.environment.log
        self._first = FirstNorms()
        self._said_s: dict[bytes, float] = {}

    def judge(self, push: Push, identity: DeltaId, item: IncomingDelta) -> PushResult | None:
        """Look at the values themselves: finite, how long, clipped by how much, room in the window."""
        state, kind = self._store.owned[item.shard].state, self._store.rule.robust
        item.norm = robust.norm_of(item.delta)
        if not math.isfinite(item.norm):
            return self.refuse(item.shard, "not_finite")
        reference = state.norms.reference()
        item.unusual = not item.repair and robust.is_unusual(item.norm, reference, len(state.norms))
        if item.repair:
            if kind and reference is not None:
                # As long as a push might be, no more: whoever mends a split is believed about identities alone.
                high = self._weights()[1]
                item.scale = robust.clip_factor(item.norm * push.weight / high, reference)
            return None
        if state.pending:
            most = MOST_HELD_OF_ONE if self._context.synchronous else robust.MOST_OF_ONE
            if sum(held.identity.node == identity.node for held in state.held()) >= most:
                return PushResult(item.shard, "retry", reason="window_full")
        if kind == "clip":
            if reference is None:
                workers = self._view.worker_count()
                reference = self._first.reference(item.shard, identity.node, item.norm, workers)
                if reference is None:
                    return PushResult(item.shard, "retry", reason="no_norms_yet")
            item.scale = robust.clip_factor(item.norm, reference)
        return None

    def note_added(self, identity: DeltaId, item: IncomingDelta) -> None:
        """Counters and events of a delta that has just been added."""
        self._first.forget(item.shard)
        counters, now = self._counters, self._clock.monotonic()
        counters.clipped += item.scale < 1.0
        if not item.unusual:
            return
        counters.unusual_norms += 1
        said_s = self._said_s.get(identity.node)
        if said_s is not None and now - said_s < UNUSUAL_S:
            return
        self._said_s.pop(identity.node, None)
        if len(self._said_s) >= MOST_SAID:
            del self._said_s[next(iter(self._said_s))]
        self._said_s[identity.node] = now
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

    def refuse(self, shard: int, reason: str) -> PushResult:
        """A final no, counted by its reason."""
        counts = self._counters.refused_here
        counts[reason] = counts.get(reason, 0) + 1
        return PushResult(shard, "refused", reason=reason)

    def clamped(self, weight: float, *, repair: bool = False) -> float:
        """The weight that an owner adds a delta with, before clipping."""
        low, high = self._weights()
        # Out of a split: weighed by two estimates, that of its side then and ours now; and as little as that made it.
        return min(weight, WEIGHT_FACTOR * high) if repair else min(max(weight, low), high)

    def _weights(self) -> tuple[float, float]:
        """The lowest and the highest weight that an honest delta may have here."""
        if self._context.settings.weight == "sum":
            return 1.0, 1.0
        own = 1.0 / max(1.0, self._view.worker_count())
        factor = WEIGHT_FACTOR * (SAMPLE_FACTOR if self._context.settings.weight == "samples" else 1.0)
        return own / factor, own * factor
