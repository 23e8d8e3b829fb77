"""Compares what owners publish with the copies of their shards that this node has as their backup, after each pull.

Nothing is asked for it, and it takes some microseconds per shard (`training.exchange.audit_records.published_values`).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from training.exchange.audit_records.published_values import POSITIONS, BackedCopy, CopyVerdict, Places
from training.exchange.context import ExchangeContext
from training.exchange.messages import PullResult
from training.exchange.store.records import Backed
from training.shards.state import ShardState


class CopyComparison:
    """The comparisons of one node with the owners of the shards that it backs up."""

    def __init__(self, context: ExchangeContext) -> None:
        self._context = context
        self._store = context.store
        self._values = context.published_values

    def pulled(self, owner: bytes, result: PullResult, codecs: Iterable[str] = ()) -> None:
        """The replica holds what an owner has just published. `codecs`: of the changes that led to it, or of the value;
        none if nothing was new."""
        shard = result.shard
        if (found := self._copy_of(owner, shard)) is None:
            return
        backed, state = found
        now_s, step_s = self._context.environment.clock.monotonic(), self._context.view.median_step_seconds()
        if not self._values.is_begun(shard, backed.token):
            self._values.begin(shard, backed.token, state.value, self._places(state.value.size))
        used = dict.fromkeys(codecs)
        verdict = self._values.compare(
            shard,
            BackedCopy(state.value, state.version, sum(map(len, state.pending.values()))),
            self._context.replica.slice_of(shard),
            result.version,
            now_s,
            step_s,
            is_rounded=(bool(result.chain) and result.published == 0) or "bfloat16" in used,
            is_sparse="sparse" in used,
        )
        if verdict is CopyVerdict.FITS:
            verdict = self._values.date(shard, state.version, result.version, now_s, step_s)
        if verdict is not CopyVerdict.FITS:
            self._values.doubt(shard, backed.token, verdict)

    def unfit(self, owner: bytes, shard: int) -> None:
        """What an owner has answered leads to no published value: nothing new has come of it."""
        if (found := self._copy_of(owner, shard)) is None:
            return
        backed, state = found
        if not self._values.is_begun(shard, backed.token):
            return
        now_s, step_s = self._context.environment.clock.monotonic(), self._context.view.median_step_seconds()
        if self._values.date(shard, state.version, None, now_s, step_s) is CopyVerdict.STALE:
            self._values.doubt(shard, backed.token, CopyVerdict.STALE)

    def _copy_of(self, owner: bytes, shard: int) -> tuple[Backed, ShardState] | None:
        backed = self._store.backed.get(shard)
        if backed is None or backed.state is None:
            self._values.forget(shard)
            return None
        if not backed.is_active or backed.owner_restarted or backed.owner.node_id != owner:
            return None
        return backed, backed.state

    def _places(self, size: int) -> Places:
        """Where the values of a shard are compared: nobody else knows."""
        if size <= POSITIONS:
            return np.arange(size)
        seed = self._context.environment.entropy.random.getrandbits(64)
        return np.sort(np.random.default_rng(seed).choice(size, POSITIONS, replace=False, shuffle=False))
