"""Makes other nodes the backups of shards, and hands shards over to these.

As in Raft, a learner receives everything but counts for nothing until it has caught up: live deltas first, the state
beside them, then a new term. The owner never stops for the copy. It takes the snapshot and begins to forward in the
same turn of the event loop, so that no delta is missed between.

A hand-over makes the backup the owner and this node its backup, in one round trip after a drain.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import msgspec

from overlay.peers import Contact
from training.cooperative import LoopYielder
from training.encoding import low_bits
from training.encoding.codecs import Vector
from training.encoding.frames import sized
from training.encoding.low_bits import LowBits
from training.exchange.context import ExchangeContext
from training.exchange.directory import PARTNER_TIMEOUT_S
from training.exchange.jobs import JobKind, Jobs
from training.exchange.owner.deltas import DeltaHandler
from training.exchange.owner.publishing import Publisher
from training.exchange.ownership_messages import HandOver, Learn, Release, ShardList, StateHead, TransferResult
from training.exchange.store import state_stream
from training.exchange.store.state_stream import describe
from training.exchange.terms import OwnerInfo, Term
from training.shards.state import ShardState

#: States of at most this many bytes are copied and sent in one request.
BATCH_BYTES = 64 * 1024 * 1024
#: Where nothing waits for a copy, no more is sent than the line carries in so many seconds: what was copied when a
#: request fails is copied again.
BATCH_S = 8.0
#: Bytes per value of a state with momentum on the wire: value and momentum, each float32.
STATE_BYTES_PER_VALUE = 8
VALUE_BYTES = 4

Snapshot = tuple[StateHead, ShardState]


class Learners:
    """Makes other nodes the backups of shards owned here."""

    def __init__(self, context: ExchangeContext, jobs: Jobs, publisher: Publisher) -> None:
        self._context = context
        self._publisher = publisher
        self._executor = context.environment.executor
        self._store = context.store
        self._rpc = context.rpc
        self._clock = context.environment.clock
        self._jobs = jobs

    async def add_learner(self, to: Contact, shards: list[int]) -> None:
        """Make a node the backup of shards. Raises `TransportError`."""
        while shards:
            batch = self._first(shards, BATCH_BYTES)
            await self._catch_up(to, batch)
            shards = shards[len(batch) :]

    def batch(self, shards: list[int]) -> list[int]:
        """The first of these shards, as many as the measured line carries in `BATCH_S`; at least one."""
        rate = self._context.swarm.line.upload.bytes_per_s
        return self._first(shards, BATCH_BYTES if rate is None else BATCH_S * rate)

    def _first(self, shards: list[int], left_bytes: float) -> list[int]:
        for count, shard in enumerate(shards):
            left_bytes -= self._state_bytes(shard)
            if left_bytes < 0:
                return shards[: max(1, count)]
        return shards

    def _state_bytes(self, shard: int) -> int:
        """About what a copy takes on the line."""
        owned, size = self._store.owned.get(shard), self._store.size(shard)
        if owned is not None and owned.state.table is not None:
            return owned.state.table.size_bytes
        if owned is None or owned.state.momentum is not None:
            return STATE_BYTES_PER_VALUE * size
        return (low_bits.LOW_BYTES if self._publisher.is_new(shard) else VALUE_BYTES) * size

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
        learn = Learn(asked, [promised[info.shard].number for info in asked])
        result = await self._rpc.ask(to, "learn", learn, TransferResult, PARTNER_TIMEOUT_S)
        self._store.note_owners(result.others)
        snapshots: list[Snapshot] = []
        try:
            yielder = LoopYielder()
            for shard in result.taken:
                if (snapshot := self._attach(shard, promised.get(shard), to)) is not None:
                    snapshots.append(snapshot)
                    table = snapshot[1].table
                    await yielder.after(self._store.size(shard) + (0 if table is None else 16 * len(table.entries)))
            if snapshots:
                await self._send_states(to, snapshots, dict(zip(result.taken, result.chains, strict=False)))
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
        owned.learner = to
        return snapshot

    async def _send_states(self, to: Contact, snapshots: list[Snapshot], chains: dict[int, bytes]) -> None:
        """`chains`: of which chain the receiver holds the first published value."""
        bases = {shard: self._publisher.first_value(shard, chain) for shard, chain in chains.items() if chain}
        found = await self._executor.run(_low_bits, snapshots, bases)
        low = {shard: encoded for shard, (encoded, _) in found.items()}
        snapshots = [(_by_low_bits(head, chains, found), state) for head, state in snapshots]
        heads = [head for head, _ in snapshots]
        message = ShardList([head.shard for head in heads])
        async with self._rpc.request("state", to, message, state_stream.body(snapshots, low)) as answer:
            taken = self._rpc.decoded(to, answer.head, TransferResult).taken
        released: dict[Contact, list[OwnerInfo]] = {}
        for head in heads:
            if head.shard in taken:
                former = self._promote(head, to)
                if former is not None:
                    released.setdefault(former, []).append(OwnerInfo.of(head.shard, head.term, self._context.me()))
        for former, infos in released.items():
            key = former.node_id + infos[0].shard.to_bytes(4, "big")
            self._jobs.start(JobKind.RELEASE_BACKUP, key, partial(self._release, former, infos))

    def _promote(self, head: StateHead, to: Contact) -> Contact | None:
        """Make the learner the backup; returns the former one."""
        owned = self._store.owned.get(head.shard)
        if owned is None or owned.learner != to or owned.promised != head.term.number:
            return None
        return self._store.promote_learner(head.shard, to, head.term, self._context.me(), self._clock.monotonic())

    async def _release(self, former: Contact, infos: list[OwnerInfo]) -> None:
        """Let a former backup free its memory. If this message is lost, its copies rank below those of the new backup,
        until it asks about them (`training.exchange.backup`)."""
        message = Release(infos)
        await self._rpc.ask(former, "release", message, TransferResult, PARTNER_TIMEOUT_S)


def _low_bits(snapshots: list[Snapshot], bases: Mapping[int, Vector | None]) -> dict[int, LowBits]:
    """Per shard what its receiver's base lacks of the value, where that is less than the value."""
    found = {}
    for head, state in snapshots:
        base = bases.get(head.shard)
        if base is not None and (lacking := low_bits.encode(state.value, base)) is not None:
            found[head.shard] = lacking
    return found


def _by_low_bits(head: StateHead, chains: Mapping[int, bytes], found: Mapping[int, LowBits]) -> StateHead:
    if (lacking := found.get(head.shard)) is None:
        return head
    return msgspec.structs.replace(head, chain=chains[head.shard], exceptions=lacking.exceptions)


#: A hand-over waits this long for the deltas in flight, then is given up until the next tick.
DRAIN_S = 1.0


class ShardHandover:
    """Moves the ownership of shards to their backups."""

    def __init__(self, context: ExchangeContext, deltas: DeltaHandler, publisher: Publisher) -> None:
        self._context = context
        self._store = context.store
        self._rpc = context.rpc
        self._log = context.environment.log
        self._deltas = deltas
        self._publisher = publisher

    async def hand_over(self, to: Contact, shards: list[int]) -> None:
        """Make the backup `to` the owner. Raises `TransportError`."""
        new_owners = []
        for shard in shards:
            owned = self._store.owned.get(shard)
            if owned is None:
                continue
            if owned.backup is not None and owned.backup.node_id == to.node_id:
                owned.begin_move()
                # A term above all that this node has had or promised.
                new_owners.append(OwnerInfo.of(shard, self._store.promise(shard), to))
        if not new_owners:
            return
        if not await self._deltas.drained([info.shard for info in new_owners], DRAIN_S):
            for info in new_owners:
                if (owned := self._store.owned.get(info.shard)) is not None:
                    owned.cancel_move()
            return
        # During the drain a shard may have been lost, or may have lost its backup.
        new_owners = [info for info in new_owners if self._is_moving(info)]
        known = [self._store.owned[info.shard].state.known_count for info in new_owners]
        heads, changes = self._publisher.heads_for([info.shard for info in new_owners])
        message = HandOver(new_owners, known, heads)
        # Without an answer it is unknown which node owns: `moving` stays set, and the next tick asks again.
        body = sized(*changes) if changes.size_bytes else ()
        result = await self._rpc.ask(to, "hand_over", message, TransferResult, PARTNER_TIMEOUT_S, body)
        self._context.counters.bytes_sent += changes.size_bytes
        # A refusal may mean that an earlier request arrived after all; then `others` names the receiver as owner.
        self._store.note_owners(result.others)
        self._apply(to, new_owners, dict.fromkeys(result.taken))
        if result.taken:
            self._log.info("shards_handed_over", count=len(dict.fromkeys(result.taken)), to=to.node_id.hex()[:8])

    def _apply(self, to: Contact, new_owners: list[OwnerInfo], taken: dict[int, None]) -> None:
        for info in new_owners:
            owned = self._store.owned.get(info.shard)
            if info.shard in taken:
                if owned is not None:
                    self._store.become_backup(info.shard, to, info.term)
                if not self._context.settings.replicas:
                    self._store.backed.pop(info.shard, None)
            elif owned is not None and owned.moving:
                self._store.drop_backup(info.shard, self._context.me())

    def _is_moving(self, info: OwnerInfo) -> bool:
        owned = self._store.owned.get(info.shard)
        return owned is not None and owned.moving and owned.promised == info.term.number
