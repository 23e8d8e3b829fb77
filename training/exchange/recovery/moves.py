"""Moves of shards, both sides: an owner makes another node the backup, or hands the shard over to it.

As in Raft, a learner receives everything but counts for nothing until it has caught up: live deltas first, the state
beside them, then a new term. The owner never stops for the copy. It takes the snapshot and begins to forward in the
same turn of the event loop, so that no delta is missed between. A hand-over makes the backup the owner and this node
its backup, in one round trip after a drain. Each answer lists the shards that were taken; for the others it names the
owner that this node knows.

An owner that changes its backup sends nothing more to the former one. Nor does an owner that lost its shard to the
other side of a split. So a backup asks about each copy that has not changed for a while. If the owner has another
backup, the copy is dropped. If the shard has another owner, the copy is offered to that one. A catch-up ends in the
same way, if the learner accepted it after the owner's term had risen.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import Background, Buffer, Response, TransportError
from p2pnode.training.cooperative import LoopYielder
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.encoding.frames import FrameReader, sized
from p2pnode.training.exchange.directory import PARTNER_TIMEOUT_S
from p2pnode.training.exchange.messages import encode
from p2pnode.training.exchange.owner.deltas import DeltaHandler
from p2pnode.training.exchange.owner.publishing import Publisher
from p2pnode.training.exchange.owner.replication import lacks_backup
from p2pnode.training.exchange.ownership_messages import HandOver, Learn, ShardList, StateHead, TransferResult
from p2pnode.training.exchange.peer_score import Nonsense
from p2pnode.training.exchange.rpc import ExchangeRpc
from p2pnode.training.exchange.run_state import RebalanceRequests, RunState, SwarmView
from p2pnode.training.exchange.store import shard_states
from p2pnode.training.exchange.store.records import Backed
from p2pnode.training.exchange.store.replica import Replica
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import OwnerInfo, Term
from p2pnode.training.shards.state import ShardState
from p2pnode.training.swarm import Swarm

#: States of at most this many bytes are copied and sent in one request, and no more than the line carries in so many
#: seconds: what was copied when a request fails is copied again.
BATCH_BYTES, BATCH_S = 64 * 1024 * 1024, 8.0
#: A hand-over waits this long for the deltas in flight, then is given up until the next tick.
DRAIN_S = 1.0

#: A step or a few, where steps are long. The request is small, and one covers all shards of an owner.
CONFIRM_AFTER_S = 3.0

Snapshot = tuple[StateHead, ShardState]
#: What a message of the owner changes: its term, and the number of deltas in the copy, or in the buffer of a learner.
Mark = tuple[bytes, Term, int]


@dataclass(eq=False)
class ShardMoves:
    """Copies the shards owned here to learners, and hands them over to their backups; takes those of other owners."""

    swarm: Swarm
    store: ShardStore
    replica: Replica
    view: SwarmView
    run: RunState
    rpc: ExchangeRpc
    rebalance: RebalanceRequests
    deltas: DeltaHandler
    publisher: Publisher
    environment: Environment

    def __post_init__(self) -> None:
        self._executor = self.environment.executor
        self._clock = self.environment.clock
        self._log = self.environment.log
        #: The mark of each copy when the copies were last looked at.
        self._marks: dict[int, Mark] = {}
        self._looked_s = self._clock.monotonic()

    def register(self) -> None:
        """Register the request handlers."""
        self.rpc.answer("learn", Learn, self._on_learn)
        self.rpc.register("state", ShardList, self._on_state)
        self.rpc.register("hand_over", HandOver, self._on_hand_over)
        self.rpc.answer("backing", ShardList, self._on_backing)

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
        # Promise 1 (docs/faults.md): where the term has risen since the request, the learner is another's, and its
        # promise is void.
        if owned is None or term is None or owned.promised != term.number:
            return None
        if owned.learner is not None or owned.moving:
            return None
        snapshot = shard_states.describe(shard, term, owned.state), owned.state.copy()
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

    # -- a hand-over ----------------------------------------------------------------------------------------------

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
        self.run.counters.bytes_sent += changes.size_bytes
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
            if not self.view.has_backups:
                self.store.backed.pop(info.shard, None)
        elif owned is not None and owned.moving:
            self.store.drop_backup(info.shard, self.rpc.me)

    # -- the shards of other owners --------------------------------------------------------------------------------

    async def _on_learn(self, sender: Contact, message: Learn) -> TransferResult:
        taken = []
        if not self.run.is_leaving and not self.view.score.is_quarantined(sender.node_id):
            asked = zip(message.shards, message.attempts, strict=False)
            begin = self.store.begin_catch_up
            taken = [info.shard for info, attempt in asked if begin(info.shard, info.term, sender, attempt)]
        answer = self._answer((info.shard for info in message.shards), taken)
        publications = [await self._base(shard, sender) for shard in taken]
        return TransferResult(taken, answer.others, publications if any(publications) else [])

    async def _base(self, shard: int, owner: Contact) -> bytes:
        """The publication of which this node holds the first published value, which is kept until the state has
        come."""
        publication, published = self.replica.position_of(shard)
        if not publication or published:
            return b""
        await self.rpc.turns.take(self.store.size(shard))
        if self.replica.position_of(shard) != (publication, 0):
            return b""
        is_noted = self.store.note_base(shard, owner.node_id, publication, self.replica.slice_of(shard))
        return publication if is_noted else b""

    async def _on_state(self, sender: Contact, message: ShardList, stream: AsyncIterator[Buffer]) -> Response:
        reader = FrameReader(stream)
        taken = []
        for shard in message.shards:
            most = self.view.plausible_steps()
            try:
                term, state = await shard_states.read_state(reader, shard, self.store, most, self._executor)
            except Nonsense:
                self.view.score.nonsense(sender.node_id, "state")
                raise
            if self.store.take_state(shard, term, sender, state):
                taken.append(shard)
        return Response(encode(TransferResult(taken, [])))

    async def _on_hand_over(self, sender: Contact, message: HandOver, stream: AsyncIterator[Buffer]) -> Response:
        published = await self.publisher.read_heads(message, sender.node_id, FrameReader(stream))
        taken = []
        for info, known in zip(message.shards, message.known, strict=False):
            was_owned = info.shard in self.store.owned
            if self._become_owner(info, sender, known):
                taken.append(info.shard)
                if not was_owned and info.shard in published:
                    self.publisher.go_on(info.shard, self.store.owned[info.shard], published[info.shard])
        if taken:
            publications = sum(shard in published for shard in taken)
            self._log.info(
                "shards_received", count=len(taken), publications=publications, source=sender.node_id.hex()[:8]
            )
            self.rebalance.wake()
        return Response(encode(self._answer((info.shard for info in message.shards), taken)))

    def _become_owner(self, info: OwnerInfo, sender: Contact, known: int) -> bool:
        mine = self.store.owned.get(info.shard)
        if mine is not None and mine.term == info.term:
            return True  # a retry: the answer to the first hand-over was lost
        backed = self.store.backed.get(info.shard)
        if backed is None or backed.state is None or backed.owner.node_id != sender.node_id:
            return False
        # A hand-over right after the promotion may arrive before any delta has made this learner the backup.
        promoted = backed.promised is not None and info.term.number == backed.promised.number + 1
        # Promise 1: a copy without the newest deltas, or under a term that others refuse, does not go on.
        is_successor = (backed.is_active or promoted) and self.store.ownership.admits(info.shard, info.term)
        if self.run.is_leaving or not is_successor:
            return False
        now, backup, me = self._clock.monotonic(), sender if self.view.has_backups else None, self.rpc.me
        owned = self.store.own(info.shard, backed.state, info.term, me, now, by_handover=True, backup=backup)
        is_reached = self.swarm.takes_streams(sender.node_id)
        # Promise 1: the former owner may lack a delta that this copy has, and needs a new catch-up. Promise 3: or no
        # delta reaches it.
        if backup is not None and (known != owned.state.known_count or not is_reached):
            self.store.drop_backup(info.shard, me)
        self.store.fold(info.shard, self.run.passed_step)
        return True

    def _answer(self, shards: Iterable[int], taken: list[int]) -> TransferResult:
        left = dict.fromkeys(shards).keys() - taken
        return TransferResult(taken, self.store.redirects(sorted(left)))

    # -- silent owners ------------------------------------------------------------------------------------------

    def due(self) -> dict[bytes, tuple[Contact, list[int]]]:
        """The shards to ask about, by owner, except owners that are gone: those that have not changed since the call
        before, `CONFIRM_AFTER_S` ago."""
        now = self._clock.monotonic()
        silent: dict[bytes, tuple[Contact, list[int]]] = {}
        if now - self._looked_s < CONFIRM_AFTER_S:
            return silent
        former, self._looked_s = self._marks, now
        self._marks = {shard: _mark(backed) for shard, backed in self.store.backed.items()}
        for shard, backed in self.store.backed.items():
            is_gone = backed.owner_restarted or self.view.is_gone(backed.owner.node_id)
            if former.get(shard) == self._marks[shard] and not is_gone:
                silent.setdefault(backed.owner.node_id, (backed.owner, []))[1].append(shard)
        return silent

    async def ask(self, silent: dict[bytes, tuple[Contact, list[int]]]) -> None:
        """Ask each owner about its shards. One that does not answer is left to the failure detector."""
        for owner, shards in silent.values():
            attempts = {shard: backed.attempt for shard in shards if (backed := self.store.backed.get(shard))}
            question = ShardList(shards)
            try:
                answer = await self.rpc.ask(owner, "backing", question, TransferResult, PARTNER_TIMEOUT_S)
            except TransportError as error:
                self._log.debug("backing_not_confirmed", owner=owner.node_id.hex()[:8], reason=str(error))
                continue
            for info in answer.others:
                self.store.drop_unconfirmed(info, owner, attempts.get(info.shard, 0))

    async def _on_backing(self, sender: Contact, message: ShardList) -> TransferResult:
        taken = [shard for shard in message.shards if self._needs(shard, sender)]
        return self._answer(message.shards, taken)

    def _needs(self, shard: int, sender: Contact) -> bool:
        """Whether the owner relies on this copy. Promise 1: without a backup, any copy is better than none."""
        owned = self.store.owned.get(shard)
        return owned is not None and (sender.node_id in owned.target_ids() or lacks_backup(self.view, owned))


def _without_held(snapshots: Sequence[Snapshot], bases: Mapping[int, tuple[bytes, Vector | None]]) -> list[Snapshot]:
    """The snapshots; where the value is the base that its receiver holds, bit by bit, the head names that instead."""
    found = list[Snapshot]()
    for head, state in snapshots:
        publication, base = bases.get(head.shard, (b"", None))
        is_held = base is not None and np.array_equal(state.value.view(np.uint32), base.view(np.uint32))
        found.append((msgspec.structs.replace(head, publication=publication) if is_held else head, state))
    return found


def _mark(backed: Backed) -> Mark:
    count = len(backed.buffered) if backed.state is None else backed.state.known_count
    return backed.owner.node_id, backed.term, count
