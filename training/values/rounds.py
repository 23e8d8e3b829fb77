"""Applies updates of named values to the shards that this node owns: one batch per shard at a time.

Updates wait in a queue per shard, in the order in which they came. A round takes what waits, computes what comes of it
(`training.shards.value_updates`, or the user's `pull`), and has it replicated and added like a delta
(`training.exchange.owner.replication`). A batch that a backup may have is sent again under the same identity until it
is in, or this node does not own the shard any more. So no later batch overtakes it, and no update is lost or counted
twice: who takes over has the batch, or its origin sends the update again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from training.cooperative import VALUES_PER_UPDATE, LoopYielder
from training.exchange.context import ExchangeContext
from training.exchange.messages import Push, PushResult
from training.exchange.owner.delta_item import IncomingDelta
from training.exchange.owner.replication import DeltaReplicator, not_owned
from training.exchange.store.records import Owned
from training.shards.applied import DeltaId
from training.shards.value_batch import MAX_BATCH_BYTES, MAX_UPDATES, KeyUpdate, ValueBatch, encode_batch
from training.shards.value_table import ValueTable
from training.shards.value_updates import applied, is_built_in, pulled
from training.values.encoding import decode_key
from training.values.script_pulls import SCRIPT_RETRY_S, PullOutcome, ScriptPulls, Waiting
from training.values.shard_tasks import ShardTasks, Staggered
from training.values.store import EncodedPull, EncodedValue

#: Rounds under way to the same backups: the next one takes all that has come meanwhile.
ROUNDS_AT_ONCE = 2
FIRST_RETRY_S, MAX_RETRY_S = 0.02, 0.5
#: A shard to which nothing was added for this long sends its backup an empty batch.
CHECK_S = 5.0
#: `PushResult.reason` of an update that waits or is being applied.
LATER = "later"


@dataclass(slots=True)
class _Prepared:
    """A batch that is about to be added to a shard, and what waits for it."""

    item: IncomingDelta
    waiting: list[Waiting]
    identity: DeltaId
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class ValueRounds(ShardTasks):
    """The queues and rounds of one node. `in_flight` has what a hand-over waits for, as in `DeltaHandler`."""

    def __init__(
        self,
        context: ExchangeContext,
        replicator: DeltaReplicator,
        in_flight: dict[tuple[int, DeltaId], asyncio.Future[None]],
    ) -> None:
        super().__init__("value-round", context.environment.log)
        self._context = context
        self._store = context.store
        self._run = context.run
        self._clock = context.environment.clock
        self._log = context.environment.log
        self._replicator = replicator
        self._in_flight = in_flight
        self._queues: dict[int, deque[Waiting]] = {}
        self._known: dict[tuple[int, DeltaId], Waiting] = {}
        self._rounds = Staggered(ROUNDS_AT_ONCE)
        self._numbers: dict[int, int] = {}
        self._pulls = ScriptPulls(context.environment.clock)
        self._is_pulling = False
        #: Updates of each member that wait here, and their bytes.
        self.waiting_of: dict[bytes, int] = {}
        self.waiting_bytes = 0

    def on_pull(self, pull: EncodedPull | None) -> None:
        """The `pull` of the attached script; None: there is none."""
        self._pulls.attach(pull)
        self.wake()

    @property
    def waiting(self) -> int:
        """How many updates wait here or are being applied."""
        return len(self._known)

    # -- queues -------------------------------------------------------------------------------------------------

    def find(self, shard: int, identity: DeltaId) -> Waiting | None:
        """The update, if it waits here or is being applied."""
        return self._known.get((shard, identity))

    def enqueue(
        self, shard: int, update: KeyUpdate, identity: DeltaId, sender: bytes, *, is_repair: bool = False
    ) -> Waiting:
        """Let an update of this identity wait for its round, once. The caller has checked that this node owns the shard
        and does not know the update, or has refused it."""
        if (found := self._known.get((shard, identity))) is not None:
            found.is_repair = found.is_repair or is_repair
            return found
        one = Waiting(update, identity, self._clock.monotonic(), sender, is_repair=is_repair)
        self._known[shard, identity] = one
        self._queues.setdefault(shard, deque()).append(one)
        self.waiting_of[sender] = self.waiting_of.get(sender, 0) + 1
        self.waiting_bytes += one.size_bytes
        self.wake()
        return one

    def _settle(self, shard: int, one: Waiting, result: PushResult) -> None:
        if self._known.pop((shard, one.identity), None) is None:
            return
        self.waiting_bytes -= one.size_bytes
        self.waiting_of[one.sender] -= 1
        if not self.waiting_of[one.sender]:
            del self.waiting_of[one.sender]
        one.settle(result)

    # -- rounds -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        if not self._queues:
            return
        to_pull: list[int] = []
        groups: dict[tuple[bytes, ...], list[int]] = {}
        for shard in [shard for shard in self._queues if shard not in self.busy]:
            owned = self._store.owned.get(shard)
            if owned is None:
                for one in self._queues.pop(shard):
                    self._settle(shard, one, not_owned(self._store, shard))
            elif owned.moving:
                continue
            elif is_built_in(self._queues[shard][0].update):
                groups.setdefault(owned.target_ids(), []).append(shard)
            else:
                to_pull.append(shard)
        now_s = self._clock.monotonic() if groups else 0.0
        for targets, shards in groups.items():
            if wait_s := self._rounds.wait_s(targets, now_s):
                self.wake_after(wait_s)
            else:
                self.start(shards, partial(self._round, targets, shards))
        if to_pull and not self._is_pulling and not self._pulls.rests:
            self._is_pulling = True
            self.start(to_pull, partial(self._pull_round, to_pull))

    def _take(self, shard: int, fits: Callable[[KeyUpdate], bool]) -> list[Waiting]:
        """What a batch of a shard consists of: the first that waits, and those like it. What turned out to be known
        meanwhile, as after a take-over, is settled."""
        queue, owned = self._queues.get(shard), self._store.owned.get(shard)
        taken: list[Waiting] = []
        size_bytes = 0
        while queue and owned is not None and owned.state.table is not None and len(taken) < MAX_UPDATES:
            one = queue[0]
            fate = owned.state.table.fate(one.identity)
            # What one side of a split has refused, and the other has applied, is applied.
            if fate is not None and not (fate and one.is_repair):
                queue.popleft()
                self._settle(shard, one, result_of(shard, fate))
                continue
            entry = owned.state.table.entries.get(one.update.key)
            size_bytes += one.size_bytes + (0 if entry is None else len(entry.value))
            is_by_itself = one.is_alone or (taken and taken[-1].is_alone)
            if not fits(one.update) or (taken and (size_bytes > MAX_BATCH_BYTES or is_by_itself)):
                break
            taken.append(queue.popleft())
        if queue is not None and not queue:
            self._queues.pop(shard, None)
        return taken

    def _put_back(self, shard: int, waiting: Sequence[Waiting]) -> None:
        """Their round came to nothing: they are the first of the next one."""
        queue = self._queues.setdefault(shard, deque())
        queue.extendleft(reversed([one for one in waiting if (shard, one.identity) in self._known]))
        if not queue:
            del self._queues[shard]

    async def _round(self, targets: tuple[bytes, ...], shards: list[int]) -> None:
        began_s = self._rounds.begin(targets, self._clock.monotonic())
        try:
            prepared, room_bytes, turn = [], self._room_bytes(), LoopYielder()
            fault: Exception | None = None
            for shard in shards:
                owned = self._store.owned.get(shard)
                if owned is None or owned.state.table is None or owned.moving:
                    continue
                if waiting := self._take(shard, is_built_in):
                    updates = [one.update for one in waiting]
                    try:
                        batch = applied(owned.state.table, updates, room_bytes, _late(owned.state.table, waiting))
                    except Exception as error:  # the other shards go on
                        self._put_back(shard, waiting)
                        fault = error
                        continue
                    prepared.append(self._prepare(shard, waiting, batch, owned))
                    await turn.after(VALUES_PER_UPDATE * len(waiting))
            await self._commit(prepared)
            if fault is not None:
                raise fault
        finally:
            self._rounds.end(targets, began_s)
            self.free(shards)

    async def _pull_round(self, shards: list[int]) -> None:
        """One call of the user's `pull` for all shards with updates for it; their batches are added while the next
        call runs."""
        taken = {shard: self._take(shard, lambda update: not is_built_in(update)) for shard in shards}
        owned = {shard: self._store.owned.get(shard) for shard in shards}
        outcome: dict[int, PullOutcome] = {}
        try:
            outcome = await self._pulls.outcome(taken, _present(taken, owned))
        finally:
            self._is_pulling = False
            for shard, waiting in taken.items():
                self._put_back(shard, [one for one in waiting if shard not in outcome or one not in outcome[shard][0]])
            if self._pulls.rests:
                asyncio.get_running_loop().call_later(SCRIPT_RETRY_S, self.wake)
            self.free([shard for shard in shards if shard not in outcome])
        try:
            prepared = []
            for shard, (waiting, results, failed) in outcome.items():
                basis = owned[shard]
                is_mine = basis is not None and self._store.owned.get(shard) is basis and not basis.moving
                if basis is None or basis.state.table is None or not is_mine:
                    self._put_back(shard, waiting)
                elif waiting:
                    updates = [one.update for one in waiting]
                    batch = pulled(basis.state.table, updates, results, failed, self._room_bytes())
                    prepared.append(self._prepare(shard, waiting, batch, basis))
            await self._commit(prepared)
        finally:
            self.free(outcome)

    def _room_bytes(self) -> int:
        """How much larger the tables owned here may become."""
        room_bytes = self._context.settings.value_bytes
        for owned in self._store.owned.values():
            if owned.state.table is not None:
                room_bytes -= owned.state.table.size_bytes
        return room_bytes

    # -- adding -------------------------------------------------------------------------------------------------

    def _prepare(self, shard: int, waiting: list[Waiting], batch: ValueBatch, basis: Owned) -> _Prepared:
        self._numbers[shard] = self._numbers.get(shard, 0) + 1
        identity = DeltaId(self._context.swarm.node_id, self._run.incarnation, self._numbers[shard])
        return self._prepare_as(identity, shard, waiting, batch, basis)

    def _prepare_as(
        self, identity: DeltaId, shard: int, waiting: list[Waiting], batch: ValueBatch, basis: Owned
    ) -> _Prepared:
        item = IncomingDelta.of_batch(shard, encode_batch(batch), batch, identity.step, basis)
        prepared = _Prepared(item, waiting, identity)
        self._in_flight[shard, identity] = prepared.done
        return prepared

    async def check_backups(self) -> None:
        """Send the backups of shards to which nothing was added for `CHECK_S` an empty batch, again and again: one that
        has lost its copy says so, and the shard gets another. Until cancelled."""
        former: dict[int, tuple[Owned, int]] = {}
        while True:
            await asyncio.sleep(CHECK_S * self._context.jitter())
            quiet = []
            for shard, owned in list(self._store.owned.items()):
                seen = owned, owned.state.version
                is_free = owned.backup is not None and not owned.moving and shard not in self.busy
                if is_free and former.get(shard) == seen and not self.is_halted:
                    quiet.append(shard)
                former[shard] = seen
            if quiet:
                self.start(quiet, partial(self._check_round, quiet))

    async def _check_round(self, shards: list[int]) -> None:
        try:
            prepared = []
            for shard in shards:
                owned = self._store.owned.get(shard)
                if owned is not None and owned.state.table is not None and not owned.moving:
                    batch = ValueBatch(owned.state.table.order, [], [])
                    prepared.append(self._prepare(shard, [], batch, owned))
            await self._commit(prepared)
        finally:
            self.free(shards)

    async def close(self, shard: int, identity: DeltaId, void: list[KeyUpdate], reasons: list[str]) -> PushResult:
        """Record that every update of a batch of the other side of a split is known here: by a batch of its identity,
        with those that change nothing: refused ones, with their `reasons`, and others, whose reason is empty."""
        while (flight := self._in_flight.get((shard, identity))) is not None:
            await asyncio.shield(flight)
        owned = self._store.owned.get(shard)
        if owned is None or owned.state.table is None:
            return not_owned(self._store, shard)
        if owned.moving:
            return PushResult.retry(shard, "moving")
        if not owned.state.knows(identity):
            refused = [(place, reason) for place, reason in enumerate(reasons) if reason]
            batch = ValueBatch(owned.state.table.order, void, [], refused)
            await self._commit([self._prepare_as(identity, shard, [], batch, owned)])
        is_in = self._store.owned.get(shard) is owned and owned.state.knows(identity)
        return PushResult(shard, "ok", owned.state.version) if is_in else PushResult.retry(shard, "moving")

    async def _commit(self, prepared: list[_Prepared]) -> None:
        """Replicate batches and add them; returns when each is in, or is void."""
        try:
            groups: dict[tuple[bytes, int], list[_Prepared]] = {}
            for one in prepared:
                groups.setdefault(one.identity[:2], []).append(one)
            for origin, group in groups.items():
                await self._commit_as(origin, group)
        finally:
            for one in prepared:
                self._in_flight.pop((one.item.shard, one.identity), None)
                if not one.done.done():
                    one.done.set_result(None)

    async def _commit_as(self, origin: tuple[bytes, int], group: list[_Prepared]) -> None:
        left = {one.item.shard: one for one in group}
        pause_s = FIRST_RETRY_S
        while left:
            push = Push(*origin, 0, 0, 1.0, list(left))
            items = [one.item for one in left.values()]
            try:
                results = await self._replicator.replicate_and_add(push, DeltaId(*origin, 0), items)
            except Exception as error:  # a backup may have these batches: they are sent again as they are
                self._log.error("exchange_service_failed", service="value-round", error=repr(error))
                results = [PushResult.retry(item.shard, "backup_silent") for item in items]
            for result in results:
                one = left[result.shard]
                is_void = self._store.owned.get(result.shard) is not one.item.basis
                if result.status == "retry" and not is_void and not self._run.is_drained:
                    continue
                del left[result.shard]
                self._finish(one, result)
            if left:
                await asyncio.sleep(pause_s * self._context.jitter())
                pause_s = min(2 * pause_s, MAX_RETRY_S)

    def _finish(self, one: _Prepared, result: PushResult) -> None:
        batch, shard = one.item.batch, one.item.shard
        reasons = dict(batch.refused) if batch is not None else {}
        if result.status == "ok" and one.waiting:
            counters = self._context.counters
            counters.value_batches += 1
            counters.values_refused += len(reasons)
            counters.values_updated += len(one.waiting) - len(reasons)
        for place, waiting in enumerate(one.waiting):
            settled = result
            if result.status == "ok":
                settled = result_of(shard, reasons.get(place, ""))
                if waiting.is_repair and settled.status == "refused":
                    self._context.counters.lost_in_splits += 1
                    key = repr(decode_key(waiting.update.key))
                    self._log.error("value_update_lost", shard=shard, key=key, reason=settled.reason)
            self._settle(shard, waiting, settled)


def _late(table: ValueTable, waiting: list[Waiting]) -> list[int]:
    """The places of updates that come late: from the other side of a split, or after a later one of their origin, which
    sends them in order."""
    return [
        place
        for place, one in enumerate(waiting)
        if one.is_repair or one.update.number < table.known.last(one.update.node, one.update.incarnation)
    ]


def _present(taken: dict[int, list[Waiting]], owned: dict[int, Owned | None]) -> dict[bytes, EncodedValue]:
    """The present values of the keys that the updates of these shards are for."""
    present = {}
    for shard, waiting in taken.items():
        basis = owned[shard]
        table = None if basis is None else basis.state.table
        for one in waiting:
            entry = None if table is None else table.entries.get(one.update.key)
            if entry is not None:
                present[one.update.key] = entry.value, entry.timestamp
    return present


def result_of(shard: int, fate: str) -> PushResult:
    """The final answer to an update that is applied, or was refused for this reason."""
    return PushResult(shard, "refused", reason=fate) if fate else PushResult(shard, "ok")
