"""The backup of shards: takes forwarded deltas, states and hand-overs, and asks a silent owner whether it still counts.

Each answer lists the shards that were taken; for the others it names the owner that this node knows.

An owner that changes its backup releases the former one, but that message may be lost. An owner that lost its shard to
the other side of a split sends nothing. The copy would then stay until the owner crashes, and count as that of the
backup. So a backup asks about each copy that has not changed for `CONFIRM_AFTER_S`. If the owner has another backup,
the copy is dropped. If the shard has another owner, the copy is offered to that one. A catch-up ends in the same way. A
learner that accepted it after the owner's term had risen would otherwise wait for the state until cancelled.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import numpy as np

from overlay.peers import Contact
from overlay.transport import Buffer, Response, TransportError
from training.cooperative import LoopYielder
from training.encoding import codecs
from training.encoding.codecs import CodecName, Vector
from training.encoding.frames import FrameReader, Part, read_encoded
from training.exchange.context import ExchangeContext
from training.exchange.directory import PARTNER_TIMEOUT_S
from training.exchange.messages import Forward, ForwardAnswer, Forwarded, ForwardResult, encode
from training.exchange.own_deltas import SentDeltas
from training.exchange.owner.delta_item import read_item
from training.exchange.owner.publishing import Publisher
from training.exchange.owner.validation import is_good
from training.exchange.ownership_messages import (
    HandOver,
    Learn,
    Release,
    ShardList,
    TransferResult,
)
from training.exchange.peer_score import Nonsense
from training.exchange.store import state_stream
from training.exchange.store.records import Backed, BufferedDelta
from training.exchange.terms import OwnerInfo, Term
from training.shards.applied import DeltaId
from training.shards.delta_range import is_delta_in_range

#: A step or a few, where steps are long. The request is small, and one covers all shards of an owner.
CONFIRM_AFTER_S = 5.0

#: What a message of the owner changes: its term, and the number of deltas in the copy, or in the buffer of a learner.
Mark = tuple[bytes, Term, int]


class BackupConfirmation:
    """Sends and answers `backing`."""

    def __init__(self, context: ExchangeContext) -> None:
        self._context = context
        self._store = context.store
        self._view = context.view
        self._rpc = context.rpc
        self._clock = context.environment.clock
        self._log = context.environment.log
        #: The mark of each copy, and when it last changed or was last asked about.
        self._seen: dict[int, tuple[Mark, float]] = {}
        self._rpc.register("backing", ShardList, self._on_backing)

    def due(self) -> dict[bytes, tuple[Contact, list[int]]]:
        """The shards to ask about, by owner, except owners that are gone; records which copies have changed."""
        now = self._clock.monotonic()
        silent: dict[bytes, tuple[Contact, list[int]]] = {}
        seen: dict[int, tuple[Mark, float]] = {}
        for shard, backed in self._store.backed.items():
            mark, owner = _mark(backed), backed.owner
            is_gone = backed.owner_restarted or self._view.is_gone(owner.node_id)
            former, since = self._seen.get(shard, (None, now))
            if former != mark:
                since = now
            elif now - since >= CONFIRM_AFTER_S and not is_gone:
                silent.setdefault(owner.node_id, (owner, []))[1].append(shard)
                since = now  # whatever the answer, the next request is as far off
            seen[shard] = mark, since
        self._seen = seen
        return silent

    async def ask(self, silent: dict[bytes, tuple[Contact, list[int]]]) -> None:
        """Ask each owner about its shards. One that does not answer is left to the failure detector."""
        for owner, shards in silent.values():
            attempts = {shard: backed.attempt for shard in shards if (backed := self._store.backed.get(shard))}
            try:
                question = ShardList(shards)
                answer = await self._rpc.ask(owner, "backing", question, TransferResult, PARTNER_TIMEOUT_S)
            except TransportError as error:
                self._log.debug("backing_not_confirmed", owner=owner.node_id.hex()[:8], reason=str(error))
                continue
            for info in answer.others:
                self._store.drop_unconfirmed(info, owner, attempts.get(info.shard, 0))

    async def _on_backing(self, sender: Contact, message: ShardList, _stream: AsyncIterator[Buffer]) -> Response:
        taken: list[int] = []
        others: list[OwnerInfo] = []
        for shard in message.shards:
            if self._store.relies_on(shard, sender.node_id):
                taken.append(shard)
            elif (known := self._store.redirect(shard)) is not None:
                others.append(known)
        return Response(encode(TransferResult(taken, others)))


def _mark(backed: Backed) -> Mark:
    count = len(backed.buffered) if backed.state is None else backed.state.known_count
    return backed.owner.node_id, backed.term, count


Encoded = bytes | bytearray | memoryview


class _Take(Protocol):
    """Decides whether this node takes one shard of a message."""

    def __call__(self, info: OwnerInfo, sender: Contact) -> bool: ...


class BackupHandler:
    """Receives deltas, states and roles from the owners of shards."""

    def __init__(self, context: ExchangeContext, publisher: Publisher, sent: SentDeltas) -> None:
        self._context = context
        self._sent = sent
        self._publisher = publisher
        self._store = context.store
        self._rpc = context.rpc
        self._run = context.run
        self._rebalance = context.rebalance
        self._counters = context.counters
        self._clock = context.environment.clock
        self._executor = context.environment.executor
        self._log = context.environment.log

    def register(self) -> None:
        """Register the request handlers."""
        self._rpc.register("forward", Forward, self._on_forward)
        self._rpc.register("learn", Learn, self._on_learn)
        self._rpc.register("state", ShardList, self._on_state)
        self._rpc.register("hand_over", HandOver, self._on_hand_over)
        self._rpc.register("release", Release, self._on_release)

    # -- forwarded deltas ---------------------------------------------------------------------------------------

    async def _on_forward(self, sender: Contact, message: Forward, stream: AsyncIterator[Buffer]) -> Response:
        reader = FrameReader(stream)
        identity = DeltaId(message.node, message.incarnation, message.step)
        results = []
        turn = LoopYielder()
        for entry in message.shards:
            if entry.shard >= len(self._store):
                results.append(ForwardResult(entry.shard, "unknown"))
                continue
            if self._store.holds_values:
                batch = await read_item(reader, entry.shard, 0)
                self._counters.bytes_received += len(batch.encoded)
                await turn.after(batch.work)
                theirs = DeltaId(message.node, message.incarnation, entry.number or message.step)
                results.append(self._accept(entry, batch.buffered(theirs, 1.0, synchronous=False), sender))
                continue
            if entry.has_it:
                own = await self._own_delta(sender, identity, entry.shard)
                if own is None:
                    results.append(ForwardResult(entry.shard, "lacks"))
                    continue
                (delta, encoded, codec), is_in_range = own, True  # it was checked when it was pushed
            else:
                encoded, codec = await read_encoded(reader, entry.shard, Part.DELTA, self._store.size(entry.shard))
                self._counters.bytes_received += len(encoded)
                size = self._store.size(entry.shard)
                delta, is_in_range = await self._context.turns.run(
                    self._executor, size, _decoded_in_range, encoded, codec, size
                )
            if message.step > self._context.view.plausible_steps().furthest:
                results.append(ForwardResult(entry.shard, "unknown"))
                continue
            if not is_in_range:
                self._log.warning("forward_out_of_range", source=sender.node_id.hex()[:8], shard=entry.shard)
                self._context.nonsense(sender.node_id, "forward")
                results.append(ForwardResult(entry.shard, "unknown"))
                continue
            item = BufferedDelta(
                identity,
                message.weight * entry.scale,
                delta,
                message.synchronous,
                encoded,
                codec,
                message.momentum,
                entry.norm if message.momentum else 0.0,
            )
            results.append(self._accept(entry, item, sender))
        return Response(encode(ForwardAnswer(results)))

    def _accept(self, entry: Forwarded, item: BufferedDelta, sender: Contact) -> ForwardResult:
        folded = entry.folded_step and min(entry.folded_step, self._context.view.plausible_steps().furthest)
        status, known = self._store.accept_forward(entry.shard, entry.term, item, folded, sender.node_id)
        backed = self._store.backed.get(entry.shard)
        if backed is not None and backed.state is not None and not is_good(backed.state, self._clock.monotonic()):
            self._store.drop_copy(entry.shard)  # the owner hears of it now, and sends its state again
            self._log.error("copy_broken", shard=entry.shard)
            return ForwardResult(entry.shard, "unknown", known)
        return ForwardResult(entry.shard, status, known)

    async def _decoded(self, shard: int, encoded: Encoded, codec: CodecName) -> Vector:
        size = self._store.size(shard)
        return await self._context.turns.run(self._executor, size, codecs.decoded, encoded, codec, size)

    async def _own_delta(
        self, sender: Contact, identity: DeltaId, shard: int
    ) -> tuple[Vector, Encoded, CodecName] | None:
        """This node's own delta, decoded and as it was sent to the owner; None if it is not kept and not known."""
        if (sent := self._sent.find(identity, shard)) is not None:
            return await self._decoded(shard, sent.encoded, sent.codec), sent.encoded, sent.codec
        backed = self._store.backed.get(shard)
        is_active = backed is not None and backed.is_active and backed.owner.node_id == sender.node_id
        if is_active and backed is not None and backed.state is not None and backed.state.knows(identity):
            # A forward that came late: the delta is in, and its values are not looked at.
            return np.zeros(0, np.float32), b"", "float32"
        return None

    # -- catch-up -----------------------------------------------------------------------------------------------

    async def _on_learn(self, sender: Contact, message: Learn, _stream: AsyncIterator[Buffer]) -> Response:
        attempts = {info.shard: number for info, number in zip(message.shards, message.attempts, strict=False)}

        def take(info: OwnerInfo, sender: Contact) -> bool:
            attempt = attempts.get(info.shard)
            if attempt is None or self._run.is_leaving or self._context.view.score.is_ignored(sender.node_id):
                return False
            return self._store.begin_catch_up(info.shard, info.term, sender, attempt)

        result = self._take_each(sender, message.shards, take)
        replica, turn, chains = self._context.replica, LoopYielder(), []
        for shard in result.taken:
            chain, published = replica.position_of(shard)
            chains.append(chain if published == 0 and self._store.is_learning(shard, sender.node_id) else b"")
            if chains[-1]:
                self._store.note_base(shard, chain, replica.slice_of(shard))
                await turn.after(self._store.size(shard))
        return Response(encode(TransferResult(result.taken, result.others, chains if any(chains) else [])))

    async def _on_state(self, sender: Contact, message: ShardList, stream: AsyncIterator[Buffer]) -> Response:
        reader = FrameReader(stream)
        taken = []
        for shard in message.shards:
            most = self._context.view.plausible_steps()
            try:
                term, state = await state_stream.read_state(reader, shard, self._store, most, self._executor)
            except Nonsense:
                self._context.nonsense(sender.node_id, "state")
                raise
            if self._store.take_state(shard, term, sender, state):
                taken.append(shard)
        return Response(encode(TransferResult(taken, [])))

    def _take_each(self, sender: Contact, infos: list[OwnerInfo], take: _Take) -> TransferResult:
        taken, others = [], []
        for info in infos:
            if take(info, sender):
                taken.append(info.shard)
            elif (known := self._store.redirect(info.shard)) is not None:
                others.append(known)
        return TransferResult(taken, others)

    # -- hand-over and release ----------------------------------------------------------------------------------

    async def _on_hand_over(self, sender: Contact, message: HandOver, stream: AsyncIterator[Buffer]) -> Response:
        published = await self._publisher.read_heads(message, sender.node_id, FrameReader(stream))
        known = {info.shard: count for info, count in zip(message.shards, message.known, strict=False)}

        def take(info: OwnerInfo, sender: Contact) -> bool:
            was_owned = info.shard in self._store.owned
            is_taken = self._become_owner(info, sender, known.get(info.shard, -1))
            if is_taken and not was_owned and info.shard in published:
                self._publisher.go_on(info.shard, self._store.owned[info.shard], published[info.shard])
            return is_taken

        result = self._take_each(sender, message.shards, take)
        if result.taken:
            chains = sum(shard in published for shard in result.taken)
            source = sender.node_id.hex()[:8]
            self._log.info("shards_received", count=len(result.taken), chains=chains, source=source)
            self._rebalance.wake()
        return Response(encode(result))

    def _become_owner(self, info: OwnerInfo, sender: Contact, known: int) -> bool:
        mine = self._store.owned.get(info.shard)
        if mine is not None and mine.term == info.term:
            return True  # a retry: the answer to the first hand-over was lost
        backed = self._store.backed.get(info.shard)
        if backed is None or backed.state is None or backed.owner.node_id != sender.node_id:
            return False
        # A hand-over right after the promotion may arrive before any delta has made this learner the backup.
        promoted = backed.promised is not None and info.term.number == backed.promised.number + 1
        if self._run.is_leaving or not (backed.is_active or promoted):
            return False
        if info.term < self._store.ownership.fence(info.shard) or not self._store.ownership.is_plausible(info.term):
            return False
        now, backup = self._clock.monotonic(), sender if self._context.settings.replicas else None
        owned = self._store.own(
            info.shard, backed.state, info.term, self._context.me(), now, by_handover=True, backup=backup
        )
        is_reached = self._context.swarm.takes_streams(sender.node_id)
        if backup is not None and (known != owned.state.known_count or not is_reached):
            # The former owner may lack a delta that this copy has, and needs a new catch-up. Or no delta reaches it.
            self._store.drop_backup(info.shard, self._context.me())
        if self._context.synchronous:
            self._store.fold(info.shard, self._run.passed_step)
        return True

    async def _on_release(self, sender: Contact, message: Release, _stream: AsyncIterator[Buffer]) -> Response:
        return Response(encode(self._take_each(sender, message.shards, self._release)))

    def _release(self, info: OwnerInfo, sender: Contact) -> bool:
        if self._context.view.score.is_ignored(sender.node_id):
            return False  # this node goes on with its copy
        return self._store.release(info.shard, info.term, sender)


def _decoded_in_range(encoded: Encoded, codec: CodecName, size: int) -> tuple[Vector, bool]:
    delta = codecs.decoded(encoded, codec, size)
    return delta, is_delta_in_range(delta)
