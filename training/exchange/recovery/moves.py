"""Makes other nodes the backups of shards, and hands shards over to these; `training.exchange.backup` answers.

As in Raft, a learner receives everything but counts for nothing until it has caught up: live deltas first, the state
beside them, then a new term. The owner never stops for the copy. It takes the snapshot and begins to forward in the
same turn of the event loop, so that no delta is missed between.

A hand-over makes the backup the owner and this node its backup, in one round trip after a drain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import Background
from p2pnode.training.cooperative import LoopYielder
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.encoding.frames import sized
from p2pnode.training.exchange.directory import PARTNER_TIMEOUT_S
from p2pnode.training.exchange.owner.deltas import DeltaHandler
from p2pnode.training.exchange.owner.publishing import Publisher
from p2pnode.training.exchange.ownership_messages import HandOver, Learn, ShardList, StateHead, TransferResult
from p2pnode.training.exchange.rpc import ExchangeRpc
from p2pnode.training.exchange.run_state import Counters
from p2pnode.training.exchange.store import shard_states
from p2pnode.training.exchange.store.shard_states import describe
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import OwnerInfo, Term
from p2pnode.training.shards.state import ShardState
from p2pnode.training.swarm import Swarm

#: States of at most this many bytes are copied and sent in one request, and no more than the line carries in so many
#: seconds: what was copied when a request fails is copied again.
BATCH_BYTES, BATCH_S = 64 * 1024 * 1024, 8.0
#: A hand-over waits this long for the deltas in flight, then is given up until the next tick.
DRAIN_S = 1.0

Snapshot = tuple[StateHead, ShardState]


@dataclass(eq=False)
class ShardMoves:
    """Copies the shards owned here to learners, and hands them over to their backups."""

    swarm: Swarm
    store: ShardStore
    rpc: ExchangeRpc
    deltas: DeltaHandler
    publisher: Publisher
    counters: Counters
    environment: Environment
    #: Whether the former owner of a shard backs it up.
    has_backups: bool

    def __post_init__(self) -> None:
        self._executor = self.environment.executor
        self._clock = self.environment.clock
        self._log = self.environment.log

    # -- a new backup -------------------------------------------------------------------------------------------

    async def copy(self, to: Contact, shards: Sequence[int]) -> None:
        """Make a node the backup of one batch of these shards, the first that it takes. Raises `TransportError`."""
        is_taken = False
        while shards and not is_taken:
            batch = self._batch(shards)
            is_taken = await self._catch_up(to, batch)
            shards = shards[len(batch) :]

    async def _catch_up(self, to: Contact, shards: Sequence[int]) -> bool:
        promised: dict[int, Term] = {}
        asked: list[OwnerInfo] = []
        for shard in shards:
            owned = self.store.owned.get(shard)
            if owned is not None and owned.learner is None and not owned.moving:
                promised[shard] = self.store.promise(shard)
                asked.append(OwnerInfo.of(shard, owned.term, self.rpc.me))
        if not asked:
            return False
        learn = Learn(asked, [promised[info.shard].number for info in asked])
        result = await self.rpc.ask(to, "learn", learn, TransferResult, PARTNER_TIMEOUT_S)
        self.store.note_owners(result.others)
        snapshots: list[Snapshot] = []
        try:
            yielder = LoopYielder()
            for shard in result.taken:
                if (snapshot := self._attach(shard, promised.get(shard), to)) is not None:
                    snapshots.append(snapshot)
                    await yielder.after(snapshot[1].size_bytes // 4)
            if snapshots:
                await self._send_states(to, snapshots, dict(zip(result.taken, result.publications, strict=False)))
        finally:
            for head, _ in snapshots:
                if (owned := self.store.owned.get(head.shard)) is not None:
                    owned.remove_learner(to.node_id)
        return bool(snapshots)

    def _batch(self, shards: Sequence[int]) -> Sequence[int]:
        """The first of these shards, as many as are sent at once; at least one."""
        rate = self.swarm.line.upload.bytes_per_s
        left_bytes = BATCH_BYTES if rate is None else min(BATCH_BYTES, BATCH_S * rate)
        for count, shard in enumerate(shards):
            owned = self.store.owned.get(shard)
            left_bytes -= 0 if owned is None else owned.state.size_bytes
            if left_bytes < 0:
                return shards[: max(1, count)]
        return shards

    def _attach(self, shard: int, term: Term | None, to: Contact) -> Snapshot | None:
        """Copy the state and forward every delta from now on; nothing else runs in between."""
        owned = self.store.owned.get(shard)
        # Promise 1: where the term has risen since the request, the learner is another's, and its promise is void.
        if owned is None or term is None or owned.promised != term.number:
            return None
        if owned.learner is not None or owned.moving:
            return None
        snapshot = describe(shard, term, owned.state), owned.state.copy()
        owned.learner = to
        return snapshot

    async def _send_states(self, to: Contact, snapshots: list[Snapshot], publications: dict[int, bytes]) -> None:
        """`publications`: of which publication the receiver holds the first published value."""
        first = self.publisher.first_value
        bases = {shard: (name, first(shard, name)) for shard, name in publications.items() if name}
        snapshots = await self._executor.run(_without_held, snapshots, bases)
        message = ShardList([head.shard for head, _ in snapshots])
        async with self.rpc.request("state", to, message, Background(shard_states.body(snapshots))) as answer:
            taken = self.rpc.decoded(to, answer.head, TransferResult).taken
        me, now = self.rpc.me, self._clock.monotonic()
        for shard, term in [(head.shard, head.term) for head, _ in snapshots if head.shard in taken]:
            owned = self.store.owned.get(shard)
            if owned is not None and owned.learner == to and owned.promised == term.number:
                self.store.promote_learner(shard, to, term, me, now)

    # -- hand-over ----------------------------------------------------------------------------------------------

    async def hand_over(self, to: Contact, shards: Sequence[int]) -> None:
        """Make the backup `to` the owner. Raises `TransportError`."""
        new_owners = []
        for shard in shards:
            owned = self.store.owned.get(shard)
            if owned is not None and owned.backup is not None and owned.backup.node_id == to.node_id:
                owned.moving = True
                # A term above all that this node has had or promised.
                new_owners.append(OwnerInfo.of(shard, self.store.promise(shard), to))
        # Promise 4: a move waits for what is in flight, and for no more.
        if not await self.deltas.drained([info.shard for info in new_owners], DRAIN_S):
            for info in new_owners:
                if (owned := self.store.owned.get(info.shard)) is not None:
                    owned.moving = False
            return
        # During the drain a shard may have been lost, or may have lost its backup.
        new_owners = [info for info in new_owners if self._is_moving(info)]
        if not new_owners:
            return
        known = [self.store.owned[info.shard].state.known_count for info in new_owners]
        heads, changes = self.publisher.heads_for([info.shard for info in new_owners])
        message = HandOver(new_owners, known, heads)
        # Promise 1: without an answer it is unknown which node owns. `moving` stays set, and the next tick asks again.
        body = sized(*changes) if changes.size_bytes else ()
        result = await self.rpc.ask(to, "hand_over", message, TransferResult, PARTNER_TIMEOUT_S, body)
        self.counters.bytes_sent += changes.size_bytes
        # A refusal may mean that an earlier request arrived after all; then `others` names the receiver as owner.
        self.store.note_owners(result.others)
        for info in new_owners:
            self._end_move(info, to, is_taken=info.shard in result.taken)
        if result.taken:
            self._log.info("shards_handed_over", count=len(dict.fromkeys(result.taken)), to=to.node_id.hex()[:8])

    def _is_moving(self, info: OwnerInfo) -> bool:
        owned = self.store.owned.get(info.shard)
        return owned is not None and owned.moving and owned.promised == info.term.number

    def _end_move(self, info: OwnerInfo, to: Contact, *, is_taken: bool) -> None:
        owned = self.store.owned.get(info.shard)
        if is_taken:
            if owned is not None:
                self.publisher.leave(info.shard)
                self.store.become_backup(info.shard, to, info.term)
            if not self.has_backups:
                self.store.backed.pop(info.shard, None)
        elif owned is not None and owned.moving:
            self.store.drop_backup(info.shard, self.rpc.me)


def _without_held(snapshots: Sequence[Snapshot], bases: Mapping[int, tuple[bytes, Vector | None]]) -> list[Snapshot]:
    """The snapshots; where the value is the base that its receiver holds, bit by bit, the head names that instead."""
    found = list[Snapshot]()
    for head, state in snapshots:
        publication, base = bases.get(head.shard, (b"", None))
        is_held = base is not None and np.array_equal(state.value.view(np.uint32), base.view(np.uint32))
        found.append((msgspec.structs.replace(head, publication=publication) if is_held else head, state))
    return found
