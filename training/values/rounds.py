"""Applies updates of named values to the shards that this node owns: one batch per shard at a time.

Updates wait in a queue per shard, in the order in which they came. A round takes what waits, computes what comes of it
(`training.shards.value_updates`, or the user's `pull`), and has it replicated and added like a delta
(`training.exchange.owner.replication`). A batch that a backup may have is sent again under the same identity until it
is in, or this node does not own the shard any more. So no later batch overtakes it, and no update is lost or counted
twice: who takes over has the batch, or its origin sends the update again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from p2pnode.overlay.environment import Environment
from p2pnode.training.cooperative import VALUES_PER_UPDATE, LoopYielder
from p2pnode.training.exchange.delta import IncomingDelta
from p2pnode.training.exchange.messages import Push, PushResult
from p2pnode.training.exchange.owner.replication import DeltaReplicator, not_owned
from p2pnode.training.exchange.run_state import RunState
from p2pnode.training.exchange.store.records import Owned
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import Term
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.value_batch import MAX_BATCH_BYTES, MAX_UPDATES, KeyUpdate, ValueBatch, encode_batch
from p2pnode.training.shards.value_table import ValueTable
from p2pnode.training.shards.value_updates import applied, is_built_in, pulled
from p2pnode.training.values.encoding import decode_key
from p2pnode.training.values.script_pulls import SCRIPT_RETRY_S, PullOutcome, ScriptPulls, Waiting
from p2pnode.training.values.shard_tasks import ShardTasks
from p2pnode.training.values.store import EncodedPull, EncodedValue

FIRST_RETRY_S, MAX_RETRY_S = 0.02, 0.5
#: A shard to which nothing was added for this long sends its backup an empty batch.
CHECK_S = 5.0
#: `PushResult.reason` of an update that waits or is being applied.
LATER = "later"


class _Prepared(NamedTuple):
    """A batch that is about to be added to a shard, and what waits for it."""

    item: IncomingDelta
    waiting: Sequence[Waiting]

    @classmethod
    def of(cls, shard: int, basis: Owned, batch: ValueBatch, waiting: Sequence[Waiting] = ()) -> _Prepared:
        return cls(IncomingDelta.of_batch(shard, encode_batch(batch), batch, basis=basis), waiting)


class ValueRounds(ShardTasks):
    """The queues and rounds of one node. `in_flight` has what a hand-over waits for, as in `DeltaHandler`.
    An update that needs more than `limit_bytes` of values owned here is refused."""

    def __init__(
        self,
        *,
        node_id: bytes,
        run: RunState,
        store: ShardStore,
        replicator: DeltaReplicator,
        in_flight: dict[tuple[int, DeltaId], asyncio.Future[None]],
        limit_bytes: int,
        environment: Environment,
    ) -> None:
        super().__init__("value-round", environment)
        self._me = node_id
        self._run = run
        self._store = store
        self._replicator = replicator
        self._in_flight = in_flight
        self.limit_bytes = limit_bytes
        #: What waits or is being applied, in its order.
        self._queues: dict[int, dict[DeltaId, Waiting]] = {}
        #: How many batches of each shard were made here.
        self._numbers: dict[int, int] = {}
        self._pulls = ScriptPulls(environment.clock)
        self._is_pulling = False
        #: Set, and replaced, when updates are settled.
        self._some_settled = asyncio.Event()
        #: Updates that wait here or are being applied, and their bytes.
        self.waiting = self.waiting_bytes = 0
        #: Updates that were applied, and refused for ever, and batches that were added.
        self.applied = self.refused = self.batches = 0

    def on_pull(self, pull: EncodedPull | None) -> None:
        """The `pull` of the attached script; None: there is none."""
        self._pulls.attach(pull)
        self.wake()

    # -- queues -------------------------------------------------------------------------------------------------

    def find(self, shard: int, identity: DeltaId) -> Waiting | None:
        """The update, if it waits here or is being applied."""
        return self._queues.get(shard, {}).get(identity)

    def enqueue(self, shard: int, update: KeyUpdate, identity: DeltaId, *, is_repair: bool = False) -> Waiting:
        """Let an update wait for its round, once. The caller has checked that this node owns the shard and does not
        know the update, or has refused it."""
        if (found := self.find(shard, identity)) is not None:
            found.is_repair = found.is_repair or is_repair
            return found
        one = Waiting(update, identity, self._environment.clock.monotonic(), is_repair)
        self._queues.setdefault(shard, {})[identity] = one
        self.waiting += 1
        self.waiting_bytes += update.size_bytes
        self.wake()
        return one

    async def settled(self, waiting: list[Waiting], timeout_s: float) -> None:
        """Return when each of these updates has its result, or after a time."""
        left = [one for one in waiting if one.result is None]
        if not left:
            return
        self.wake()  # a shard that was moving may stay after all
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while left:
                    if left[-1].result is None:
                        await self._some_settled.wait()
                    else:
                        left.pop()

    def _settle(self, shard: int, results: Iterable[tuple[Waiting, PushResult]]) -> None:
        """Give updates their results, and take them out of their queue."""
        queue = self._queues[shard]
        for one, result in results:
            one.result = result
            del queue[one.identity]
            self.waiting -= 1
            self.waiting_bytes -= one.update.size_bytes
        if not queue:
            del self._queues[shard]
        self._some_settled.set()
        self._some_settled = asyncio.Event()

    # -- rounds -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        to_pull: list[int] = []
        groups: dict[tuple[bytes, ...], list[int]] = {}
        for shard in [shard for shard in self._queues if shard not in self.busy]:
            owned = self._store.owned.get(shard)
            if owned is None:
                gone = not_owned(self._store, shard)
                self._settle(shard, [(one, gone) for one in self._queues[shard].values()])
            elif not owned.moving:
                first = next(iter(self._queues[shard].values()))
                theirs = groups.setdefault(owned.target_ids(), []) if is_built_in(first.update) else to_pull
                theirs.append(shard)
        for targets, shards in groups.items():
            self.start(shards, partial(self._round, shards), targets)
        if to_pull and not self._is_pulling and not self._pulls.rests:
            self._is_pulling = True
            self.start(to_pull, partial(self._pull_round, to_pull))

    def _take(self, shard: int, owned: Owned, fits: Callable[[KeyUpdate], bool]) -> list[Waiting]:
        """The updates of a shard for a batch: the first that waits, and those like it. They stay in their queue until
        they are settled. One that turned out to be known meanwhile, as after a take-over, is settled now."""
        table = table_of(owned)
        taken: list[Waiting] = []
        known: list[tuple[Waiting, PushResult]] = []
        size_bytes = 0
        for one in islice(self._queues.get(shard, {}).values(), MAX_UPDATES):
            fate = table.fate(one.identity)
            # Promise 5 (docs/faults.md): what one side of a split has refused, and the other has applied, is applied.
            if fate is not None and not (fate and one.is_repair):
                known.append((one, result_of(shard, fate)))
                continue
            entry = table.entries.get(one.update.key)
            size_bytes += one.update.size_bytes + (0 if entry is None else len(entry.value))
            is_by_itself = one.is_alone or (taken and taken[-1].is_alone)
            if not fits(one.update) or (taken and (size_bytes > MAX_BATCH_BYTES or is_by_itself)):
                break
            taken.append(one)
        if known:
            self._settle(shard, known)
        return taken

    async def _round(self, shards: list[int], *, is_check: bool = False) -> None:
        """Add a batch of what waits for each shard; `is_check`: of nothing, too."""
        prepared, room_bytes, turn = [], self._room_bytes(), LoopYielder()
        for shard in shards:
            owned = self._store.owned.get(shard)
            if owned is None or owned.moving:
                continue
            waiting = self._take(shard, owned, is_built_in)
            if waiting or is_check:
                table = table_of(owned)
                batch = applied(table, [one.update for one in waiting], room_bytes, _late(table, waiting))
                prepared.append(_Prepared.of(shard, owned, batch, waiting))
                await turn.after(VALUES_PER_UPDATE * len(waiting))
        await self._commit(prepared)

    async def _pull_round(self, shards: list[int]) -> None:
        """One call of the user's `pull` for all shards with updates for it; their batches are added while the next
        call runs."""
        owned = {shard: self._store.owned[shard] for shard in shards if shard in self._store.owned}
        taken = {shard: self._take(shard, one, lambda update: not is_built_in(update)) for shard, one in owned.items()}
        present: dict[bytes, EncodedValue] = {}
        for shard, waiting in taken.items():
            entries = table_of(owned[shard]).entries
            for key in [one.update.key for one in waiting]:
                if (entry := entries.get(key)) is not None:
                    present[key] = entry.value, entry.timestamp
        try:
            outcome = await self._pulls.outcome(taken, present)
        finally:
            self._is_pulling = False
            if self._pulls.rests:
                asyncio.get_running_loop().call_later(SCRIPT_RETRY_S, self.wake)
        if outcome:
            self.start(list(outcome), partial(self._add_pulled, owned, outcome))

    async def _add_pulled(self, owned: dict[int, Owned], outcome: dict[int, PullOutcome]) -> None:
        room_bytes, prepared = self._room_bytes(), []
        for shard, (waiting, results, failed) in outcome.items():
            basis = owned[shard]
            # The values that `pull` was given are those of this ownership.
            if waiting and self._store.owned.get(shard) is basis:
                updates = [one.update for one in waiting]
                batch = pulled(table_of(basis), updates, results, failed, room_bytes)
                prepared.append(_Prepared.of(shard, basis, batch, waiting))
        await self._commit(prepared)

    def _room_bytes(self) -> int:
        """How much larger the tables owned here may become."""
        return self.limit_bytes - sum(table_of(owned).size_bytes for owned in self._store.owned.values())

    async def check_backups(self) -> None:
        """Send the backups of shards to which nothing was added for `CHECK_S` an empty batch, again and again: one that
        has lost its copy says so, and the shard gets another. Until cancelled."""
        former: dict[int, tuple[Term, int]] = {}
        while True:
            await asyncio.sleep(CHECK_S * self._environment.entropy.random.uniform(0.5, 1.5))
            present = {shard: (owned.term, owned.state.version) for shard, owned in self._store.owned.items()}
            quiet = [
                shard
                for shard, owned in self._store.owned.items()
                if owned.backup is not None and shard not in self.busy and former.get(shard) == present[shard]
            ]
            former = present
            if quiet:
                self.start(quiet, partial(self._round, quiet, is_check=True))

    # -- adding -------------------------------------------------------------------------------------------------

    async def close(self, shard: int, identity: DeltaId, void: list[tuple[KeyUpdate, str]]) -> PushResult:
        """Record that every update of a batch of the other side of a split is known here: by a batch of its identity,
        which changes nothing. `void`: updates that the other side has refused, with the reasons."""
        while (flight := self._in_flight.get((shard, identity))) is not None:
            await asyncio.shield(flight)
        owned = self._store.owned.get(shard)
        if owned is None:
            return not_owned(self._store, shard)
        if not owned.state.knows(identity):
            refused = [(place, reason) for place, (_, reason) in enumerate(void)]
            batch = ValueBatch(table_of(owned).order, [update for update, _ in void], [], refused)
            await self._commit([_Prepared.of(shard, owned, batch)], identity)
        is_in = self._store.owned.get(shard) is owned and owned.state.knows(identity)
        return PushResult(shard, "ok") if is_in else PushResult.retry(shard, "moving")

    async def _commit(self, prepared: list[_Prepared], foreign: DeltaId | None = None) -> None:
        """Replicate batches and add them, each under an identity of this node or the `foreign` one. Returns when each
        is in, or is void: the updates of a shard that moves wait on."""
        origin = foreign or DeltaId(self._me, self._run.incarnation, 0)
        left: dict[int, _Prepared] = {}
        flights: list[tuple[int, DeltaId]] = []
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for one in prepared:
            shard, basis = one.item.shard, one.item.basis
            # Promise 4: a hand-over waits for what was in flight when it began.
            if basis is not None and self._store.owned.get(shard) is basis and not basis.moving:
                if foreign is None:
                    self._numbers[shard] = self._numbers.get(shard, 0) + 1
                one.item.number = self._numbers[shard] if foreign is None else foreign.step
                left[shard] = one
                flights.append((shard, origin._replace(step=one.item.number)))
        self._in_flight |= dict.fromkeys(flights, done)
        pause_s = FIRST_RETRY_S
        try:
            while left:
                push = Push(origin.node, origin.incarnation, 0, 0, 1.0, list(left))
                items = [one.item for one in left.values()]
                try:
                    results = await self._replicator.replicate_and_add(push, origin._replace(step=0), items)
                except Exception as error:  # a backup may have these batches: they are sent again as they are
                    self._environment.log.error("exchange_service_failed", service=self._name, error=repr(error))
                    results = [PushResult.retry(item.shard, "backup_silent") for item in items]
                for result in results:
                    is_void = self._store.owned.get(result.shard) is not left[result.shard].item.basis
                    if result.status != "retry" or is_void or self._run.is_drained:
                        self._finish(left.pop(result.shard), result)
                if left:
                    await asyncio.sleep(pause_s * self._environment.entropy.random.uniform(0.5, 1.5))
                    pause_s = min(2 * pause_s, MAX_RETRY_S)
        finally:
            for flight in flights:
                del self._in_flight[flight]
            done.set_result(None)

    def _finish(self, one: _Prepared, result: PushResult) -> None:
        """Settle the updates of a batch that is in, or is void."""
        if not one.waiting:
            return
        shard, results = one.item.shard, [result] * len(one.waiting)
        if result.status == "ok" and one.item.batch is not None:
            reasons = dict(one.item.batch.refused)
            self.batches += 1
            self.refused += len(reasons)
            self.applied += len(one.waiting) - len(reasons)
            results = [result_of(shard, reasons.get(place, "")) for place in range(len(one.waiting))]
        for waiting, settled in zip(one.waiting, results, strict=True):
            if waiting.is_repair and settled.status == "refused":
                self._run.counters.lost_in_splits += 1
                key = repr(decode_key(waiting.update.key))
                self._environment.log.error("value_update_lost", shard=shard, key=key, reason=settled.reason)
        self._settle(shard, zip(one.waiting, results, strict=True))


def _late(table: ValueTable, waiting: list[Waiting]) -> list[int]:
    """The places of updates that come late: from the other side of a split, or after a later one of their origin, which
    sends them in order."""
    return [
        place
        for place, one in enumerate(waiting)
        if one.is_repair or one.update.number < table.known.last(one.update.node, one.update.incarnation)
    ]


def table_of(owned: Owned) -> ValueTable:
    """The table of a shard, which each has in a run of named values."""
    assert owned.state.table is not None
    return owned.state.table


def result_of(shard: int, fate: str) -> PushResult:
    """The final answer to an update that is applied, or was refused for this reason."""
    return PushResult(shard, "refused", reason=fate) if fate else PushResult(shard, "ok")
