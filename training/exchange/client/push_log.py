"""Writes the record of this node's own deltas (`training.exchange.store.push_record`) while it pushes them."""

from __future__ import annotations

import asyncio

from training.exchange.context import ExchangeContext
from training.exchange.store.push_record import BadRecord
from training.exchange.terms import generation_of
from training.shards.applied import DeltaId

RECORD_FILE = "pushed.msgpack"
#: The next write begins so many times as long after a write as that took, and no later than the interval: steps of a
#: few milliseconds are recorded one by one, for a killed process forgets what it pushed between two writes.
PAUSE_FACTOR, WRITE_INTERVAL_S = 10.0, 0.1


class PushLog:
    """The record of one node and its file. The file is not synced: it must outlive the process, at no cost to a step;
    after a loss of power it may be seconds old."""

    def __init__(self, context: ExchangeContext) -> None:
        self._context = context
        self._record = context.record
        self._disk = context.environment.disk
        self._log = context.environment.log
        self._clock = context.environment.clock
        self._changed = asyncio.Event()
        self._load()

    def _load(self) -> None:
        raw = self._disk.read(RECORD_FILE)
        if raw is None:
            return
        try:
            self._record.load(raw, self._context.run_genesis)
        except BadRecord as error:
            self._log.warning("push_record_unreadable", reason=str(error))

    def continue_with(self, context: ExchangeContext) -> None:
        """The shards were divided. Identities are of steps, whatever the shards."""
        self._context = context

    def begin(self, step: int) -> DeltaId:
        """The delta of a step is about to be pushed."""
        identity = DeltaId(self._context.swarm.node_id, self._context.run.incarnation, step)
        known = self._context.store.ownership.known_owners.values()
        self._record.begin(identity, max((generation_of(one.term) for one in known), default=0))
        self._changed.set()
        return identity

    def end(self, identity: DeltaId, *, is_added: bool) -> None:
        """The push has ended; see `PushRecord.end`. What is added was written when its push began."""
        self._record.end(identity, is_added=is_added)
        if not is_added:
            self._changed.set()

    async def run(self) -> None:
        """Write the file whenever the record has changed, until cancelled."""
        executor, is_failing = self._context.environment.executor, False
        while True:
            await self._changed.wait()
            self._changed.clear()
            began_s = self._clock.monotonic()
            try:
                data = self._record.encode(self._context.run_genesis)
                await executor.run(self._disk.write, RECORD_FILE, data, is_synced=False)
                is_failing = False
            except OSError as error:
                if not is_failing:
                    self._log.error("push_record_not_written", reason=str(error))
                is_failing = True
            took_s = self._clock.monotonic() - began_s
            await asyncio.sleep(min(WRITE_INTERVAL_S, PAUSE_FACTOR * took_s))
