"""Refusals that an owner has no reason for, as the node whose delta it is can tell.

A refused delta is lost, and nobody audits refusals. The origin knows of most reasons whether they can be true: the
delta was its own, well-formed and finite, not further behind the median than half of what is allowed, or not ahead of
it. An owner that says otherwise `training.exchange.reliability.MISBEHAVIOURS` times is left out for a while, and the
delta goes to whoever owns the shard then. Until then it stays in the outbox, and is sent at most `ATTEMPTS` times.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from overlay.peers import Contact
from training.exchange.context import ExchangeContext
from training.exchange.messages import Push, PushResult
from training.exchange.owner.delta_item import IncomingDelta
from training.shards import robust
from training.shards.delta_range import MEAN_ALWAYS

#: What no honest owner says of an honest delta.
NEVER = ("not_yours", "shape", "malformed")
#: An owner that began a new era refuses all deltas with a base before it. It begins no later than a step that some node
#: has come to, which barriers keep within their staleness limit of the median. So the bases of refused deltas pass it
#: within so many steps; this many where there is no limit.
ERA_STEPS = 64
ATTEMPTS = 12
#: Shards and deltas remembered; the oldest is forgotten first.
MAX_REMEMBERED = 4096


class FalseRefusals:
    """Those that one node has been given."""

    def __init__(self, context: ExchangeContext) -> None:
        self._context = context
        #: How often each delta of a shard was refused for no reason.
        self._refused: dict[tuple[int, int], int] = {}
        #: The base of the first of the deltas of a shard that an owner has refused in a row, as from before its era.
        self._eras: dict[tuple[bytes, int], int] = {}

    def contradicts(
        self, push: Push, owner: Contact | None, result: PushResult, item: Callable[[], IncomingDelta]
    ) -> bool:
        """Whether a final answer is a refusal that cannot be true; notes that. Then the shard is sent again.

        `item`: the delta, decoded. `owner`: None where others have handed the answer on: nobody knows who refused.
        """
        if owner is None or owner.node_id == push.node:
            return False
        if result.status == "ok":
            self._eras.pop((owner.node_id, result.shard), None)
            return False
        if not self._is_false(push, owner.node_id, result, item):
            return False
        key = push.step, result.shard
        times = self._refused[key] = self._refused.pop(key, 0) + 1
        if len(self._refused) > MAX_REMEMBERED:
            del self._refused[next(iter(self._refused))]
        self._context.misbehaved(owner.node_id, "refusal")
        return times < ATTEMPTS

    def _is_false(self, push: Push, owner: bytes, result: PushResult, item: Callable[[], IncomingDelta]) -> bool:
        view, limit = self._context.view, self._context.stale_limit
        match result.reason:
            case "late":
                return limit is None or 2 * (view.median_step() - push.base_step) <= limit
            case "ahead":
                return push.step <= view.furthest_step()
            case "sparse":
                return self._context.store.rule.robust != "trimmed-mean"
            case "not_finite":
                return math.isfinite(robust.norm_of(item().delta))
            case "out_of_range":
                delta = item().delta
                return robust.norm_of(delta) <= MEAN_ALWAYS * math.sqrt(delta.size)
            case "before_era":
                key = owner, result.shard
                first = self._eras[key] = self._eras.pop(key, push.base_step)
                if len(self._eras) > MAX_REMEMBERED:
                    del self._eras[next(iter(self._eras))]
                return push.base_step - first > (ERA_STEPS if limit is None else limit)
        return result.reason in NEVER
