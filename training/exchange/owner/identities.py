"""Keeps the sets of applied deltas of this node's shards bounded (`training.shards.forgetting`)."""

from __future__ import annotations

from overlay.environment import Environment
from training.cooperative import LoopYielder
from training.exchange.store.shard_store import ShardStore
from training.exchange.swarm_view import SwarmView
from training.shards.forgetting import Present, SilenceWatch
from training.shards.state import ShardState

#: All sets are looked at this often.
LOOK_INTERVAL_S = 60.0
#: A start of a node is silent after this long at least: no retry of a delta lives as long, and no delta of a log that a
#: repair could still bring is as old.
LEAST_SILENT_S = 600.0
#: That, in times the length of a split that is repaired, and in steps.
SILENT_LOGS = 2.0
SILENT_STEPS = 20
#: A node that is gone is forgotten when the others have come this much further.
STEPS_BEHIND = 100
#: Rows looked at between two turns of the event loop, and what one of them costs, in values (`LoopYielder`).
VALUES_PER_ROW = 1 << 9


class IdentityKeeper:
    """Forgets identities of the states that this node owns or backs up. Each node does so by itself."""

    def __init__(
        self, store: ShardStore, view: SwarmView, log_s: float, stale_limit: int | None, environment: Environment
    ) -> None:
        """`log_s`: seconds of a split that is repaired."""
        self._store = store
        self._view = view
        self._log_s = log_s
        self._stale_limit = stale_limit or 0
        self._clock = environment.clock
        self._log = environment.log
        self._looked_s = self._clock.monotonic()
        #: Per shard the state that was looked at last, and the watches of its deltas and of its updates of values.
        self._watches: dict[int, tuple[ShardState, SilenceWatch, SilenceWatch]] = {}

    def is_due(self) -> bool:
        return self._clock.monotonic() - self._looked_s >= LOOK_INTERVAL_S

    def silent_s(self) -> float:
        """After how long a start of a node counts as silent."""
        steps_s = SILENT_STEPS * self._view.median_step_seconds()
        return max(LEAST_SILENT_S, SILENT_LOGS * self._log_s, steps_s)

    async def forget(self) -> None:
        """Look at the sets of all shards."""
        self._looked_s = self._clock.monotonic()
        silent_s, turn, count = self.silent_s(), LoopYielder(), 0
        for shard in [*self._store.owned, *self._store.backed]:
            if (state := self._state(shard)) is None:
                self._watches.pop(shard, None)
                continue
            former = self._watches.get(shard)
            if former is None or former[0] is not state:
                former = self._watches[shard] = (state, SilenceWatch(), SilenceWatch())
            count += self._forget_in(former, silent_s)
            await turn.after(VALUES_PER_ROW * state.applied.row_count)
        for shard in [one for one in self._watches if self._state(one) is None]:
            del self._watches[shard]
        if count:
            self._log.debug("identities_forgotten", rows=count)

    def _state(self, shard: int) -> ShardState | None:
        if (owned := self._store.owned.get(shard)) is not None:
            return owned.state
        backed = self._store.backed.get(shard)
        return backed.state if backed is not None and backed.is_active else None

    def _forget_in(self, watches: tuple[ShardState, SilenceWatch, SilenceWatch], silent_s: float) -> int:
        """Forget what one state may."""
        state, deltas, updates = watches
        settled = None
        if self._view.has_steps:
            settled = self._view.median_step() - max(STEPS_BEHIND, self._stale_limit)
        now = self._clock.monotonic()
        present = Present(now, silent_s, self._view.incarnation_of, settled)
        count = deltas.forget(state.applied, present)
        if state.table is not None:
            count += updates.forget(state.table.known, Present(now, silent_s, self._view.incarnation_of))
        return count
