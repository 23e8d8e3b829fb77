"""Adds learners and promotes them to backups: live deltas first, the state beside them, then a new term.

As in Raft, a learner receives everything but counts for nothing until it has caught up. The owner never stops for the
copy. It takes the snapshot and begins to forward in the same turn of the event loop, so that no delta is missed
between.
"""

from __future__ import annotations

from functools import partial

from overlay.peers import Contact
from training.exchange.context import ExchangeContext
from training.exchange.cooperative import LoopYielder
from training.exchange.directory import QUESTION_TIMEOUT_S
from training.exchange.ownership_messages import Learn, Release, StateHead, StateTransfer, TransferResult
from training.exchange.recovery.jobs import JobKind, Jobs
from training.exchange.store import state_stream
from training.exchange.store.state_head import describe
from training.exchange.terms import OwnerInfo, Term
from training.shards.state import ShardState

#: States of at most this many bytes are copied and sent in one request.
BATCH_BYTES = 64 * 1024 * 1024
#: Bytes per value of a state with momentum on the wire: value, momentum, accumulated delta, each float32.
STATE_BYTES_PER_VALUE = 12

Snapshot = tuple[StateHead, ShardState]


class Learners:
    """Makes other nodes the backups of shards owned here."""

    def __init__(self, context: ExchangeContext, jobs: Jobs) -> None:
        self._context = context
        self._store = context.store
        self._rpc = context.rpc
        self._clock = context.environment.clock
        self._jobs = jobs

    async def add_learner(self, to: Contact, shards: list[int]) -> None:
        """Make a node the backup of shards. Raises `TransportError`."""
        for batch in self._batches(shards):
            await self._catch_up(to, batch)

    def _batches(self, shards: list[int]) -> list[list[int]]:
        batches: list[list[int]] = []
        remaining_bytes = 0
        for shard in shards:
            size = STATE_BYTES_PER_VALUE * self._store.size(shard)
            if not batches or size > remaining_bytes:
                batches.append([])
                remaining_bytes = BATCH_BYTES
            batches[-1].append(shard)
            remaining_bytes -= size
        return batches

    async def _catch_up(self, to: Contact, shards: list[int]) -> None:
        me = self._context.me()
        promised: dict[int, Term] = {}
        asked: list[OwnerInfo] = []
        for shard in shards:
            owned = self._store.owned.get(shard)
            if owned is not None and owned.learner is None and not owned.moving:
                promised[shard] = self._store.promise(shard)
                asked.append(OwnerInfo.of(shard, owned.term, me))
        if not asked:
            return
        learn = Learn(self._context.genesis, asked, [promised[info.shard].number for info in asked])
        result = await self._rpc.ask(to, "learn", learn, TransferResult, QUESTION_TIMEOUT_S)
        self._store.note_owners(result.others)
        snapshots: list[Snapshot] = []
        try:
            yielder = LoopYielder()
            for shard in result.taken:
                if (snapshot := self._attach(shard, promised.get(shard), to)) is not None:
                    snapshots.append(snapshot)
                    await yielder.after(self._store.size(shard))
            if snapshots:
                await self._send_states(to, snapshots)
        finally:
            for head, _ in snapshots:
                owned = self._store.owned.get(head.shard)
                if owned is not None and owned.learner == to:
                    owned.remove_learner(to.node_id)

    def _attach(self, shard: int, term: Term | None, to: Contact) -> Snapshot | None:
        """Copy the state and forward every delta from now on; nothing else runs in between."""
        owned = self._store.owned.get(shard)
        # Where the term has risen since the request, its promise is void.
        if owned is None or term is None or owned.promised != term.number:
            return None
        if owned.learner is not None or owned.moving:
            return None
        snapshot = describe(shard, term, owned.state), owned.state.copy()
        owned.attach_learner(to)
        return snapshot

    async def _send_states(self, to: Contact, snapshots: list[Snapshot]) -> None:
        heads = [head for head, _ in snapshots]
        message = StateTransfer(self._context.genesis, heads)
        async with self._rpc.request("state", to, message, state_stream.body(snapshots)) as answer:
            taken = self._rpc.decoded(to, answer.head, TransferResult).taken
        for head in heads:
            if head.shard in taken:
                self._promote(head, to)

    def _promote(self, head: StateHead, to: Contact) -> None:
        owned = self._store.owned.get(head.shard)
        if owned is None or owned.learner != to or owned.promised != head.term.number:
            return
        me = self._context.me()
        former = self._store.promote_learner(head.shard, to, head.term, me, self._clock.monotonic())
        if former is not None:
            info = OwnerInfo.of(head.shard, head.term, me)
            key = former.node_id + head.shard.to_bytes(4, "big")
            self._jobs.start(JobKind.RELEASE_BACKUP, key, partial(self._release, former, info))

    async def _release(self, former: Contact, info: OwnerInfo) -> None:
        """Let a former backup free its memory. If this message is lost, its copy ranks below the new backup's."""
        message = Release(self._context.genesis, [info])
        await self._rpc.ask(former, "release", message, TransferResult, QUESTION_TIMEOUT_S)
