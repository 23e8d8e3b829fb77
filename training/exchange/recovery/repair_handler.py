"""The answers of a node to the other side of a split: what its shards have, and the deltas that they lacked.

An owner sends the loser of a shard the identities that it has, and adds the deltas that the loser offers. A node that
searches for deltas gets those in this node's log. A delta of a step that its origin cannot have come to is not added.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator

from overlay.peers import Contact
from overlay.transport import Buffer, Response
from training.cooperative import VALUES_PER_ROW, off_loop
from training.encoding.frames import FrameReader, list_if_small
from training.exchange.context import ExchangeContext
from training.exchange.messages import MAX_DELTAS, Push, PushStatus, encode, record_frames
from training.exchange.owner.delta_item import IncomingDelta, logged_frames, read_item
from training.exchange.owner.deltas import DeltaHandler
from training.exchange.owner.replication import lacks_backup
from training.exchange.ownership_messages import (
    MAX_ROWS,
    FindDeltas,
    FoundDeltas,
    LoggedDelta,
    OfferedDeltas,
    OfferedDeltasAnswer,
    OwnedHistory,
    ShardList,
)
from training.exchange.store.repair_log import LogEntry, identities_of
from training.exchange.terms import MAX_BELIEVED, Term

#: Deltas of one request, in bytes.
MAX_BATCH_BYTES = 16 * 1024 * 1024
#: Batches of named values in one answer: each may have as many bytes as a few of the largest values.
MAX_BATCHES = 16


class RepairHandler:
    """Handles `offer`, `mend` and `seek` of other nodes."""

    def __init__(self, context: ExchangeContext, deltas: DeltaHandler) -> None:
        self._context = context
        self._swarm = context.swarm
        self._store = context.store
        self._run = context.run
        self._view = context.view
        self._counters = context.counters
        self._clock = context.environment.clock
        self._log = context.environment.log
        self._deltas = deltas
        context.rpc.register("offer", ShardList, self._on_offer, waits=True)
        context.rpc.register("seek", FindDeltas, self._on_seek)
        context.rpc.register("mend", OfferedDeltas, self._on_offered_deltas, waits=True)

    async def _on_offer(self, _sender: Contact, message: ShardList, _stream: AsyncIterator[Buffer]) -> Response:
        histories: list[OwnedHistory] = []
        left_rows = MAX_ROWS
        for shard in message.shards:
            if shard < len(self._store):
                history = self.history(shard)
                left_rows -= len(history.known)
                if histories and left_rows < 0:
                    break  # the sender asks again for the others
                histories.append(history)
        body = [buffer for one in histories for buffer in record_frames(one.shard, one)]
        return Response(encode(ShardList([one.shard for one in histories])), body)

    def history(self, shard: int) -> OwnedHistory:
        """What this node has of a shard that it owns; otherwise who owns it, or that it cannot tell now."""
        owned = self._store.owned.get(shard)
        if owned is None:
            return OwnedHistory(shard, "not_owner", owner_info=self._store.ownership.owner_info(shard))
        if owned.moving or lacks_backup(self._view, owned):
            return OwnedHistory(shard, "retry")
        state = owned.state
        known = identities_of(state)
        return OwnedHistory(
            shard,
            "owner",
            owned.term,
            state.era_step,
            Term(*state.era_term),
            known.rows(),
            known_count=state.known_count,
            unlisted=state.unlisted,
            before=known.before,
        )

    async def _on_offered_deltas(
        self, sender: Contact, message: OfferedDeltas, stream: AsyncIterator[Buffer]
    ) -> Response:
        outcomes, reader = list[PushStatus](), FrameReader(stream)
        for logged in message.deltas:
            if logged.shard >= len(self._store):
                break
            item = await read_item(reader, logged.shard, self._store.size(logged.shard), repair=True)
            self._counters.bytes_received += len(item.encoded)
            outcomes.append(await self.add(logged, item, sender.node_id))
        if added := outcomes.count("ok"):
            self._counters.repaired += added
            self._log.info("deltas_repaired", count=added, source=sender.node_id.hex()[:8])
        refused = [place for place, outcome in enumerate(outcomes) if outcome == "refused"]
        return Response(encode(OfferedDeltasAnswer(added, refused)))

    async def add(self, logged: LoggedDelta, item: IncomingDelta, source: bytes) -> PushStatus:
        """Add a delta of a repair. `retry`: it may be added later; `refused`: never."""
        return await self._unlikely(logged, source) or await self._add(logged, item)

    async def _unlikely(self, logged: LoggedDelta, source: bytes) -> PushStatus | None:
        """The answer to a delta of a step that its node has hardly come to; None to others."""
        if not self._is_past(logged):
            await self._swarm.query_steps([logged.node])
            if not self._is_past(logged):
                if logged.step > MAX_BELIEVED:
                    self._context.nonsense(source, "repair")
                peer = self._swarm.peers.get(logged.node)
                is_absurd = peer is None or logged.incarnation > peer.incarnation
                return "refused" if is_absurd or logged.step > self._view.furthest_step() else "retry"
        return None

    async def _add(self, logged: LoggedDelta, item: IncomingDelta) -> PushStatus:
        push = Push(
            node=logged.node,
            incarnation=logged.incarnation,
            step=logged.step,
            base_step=logged.step,
            weight=self._weight(logged),
            shards=[logged.shard],
        )
        (result,) = await self._deltas.accept(push, [item])
        return result.status

    def _is_past(self, logged: LoggedDelta) -> bool:
        """Whether a delta may have been trained already, as far as this node knows its origin.

        Under an identity that is still to be used a wrong delta would take the place of a true one. One that was
        pushed a moment ago may be ahead of its node's heartbeat: it is offered again.
        """
        if not self._view.has_steps:
            return logged.step <= MAX_BELIEVED
        if logged.node == self._swarm.node_id:
            return (logged.incarnation, logged.step) <= (self._run.incarnation, self._run.step + 2)
        peer = self._swarm.peers.get(logged.node)
        if peer is None or not self._swarm.is_alive(logged.node):
            return logged.step <= self._view.furthest_step()
        return (logged.incarnation, logged.step) <= (peer.incarnation, peer.step + 1)

    def _weight(self, logged: LoggedDelta) -> float:
        """Each side had counted only its own workers."""
        if self._context.settings.weight == "sum":
            return logged.weight
        return self._view.merged_weight(logged.weight, logged.workers)

    async def _on_seek(self, _sender: Contact, message: FindDeltas, _stream: AsyncIterator[Buffer]) -> Response:
        if message.shard >= len(self._store):
            return Response(encode(FoundDeltas([])))
        executor, size = self._context.environment.executor, self._store.size(message.shard)
        work, log = VALUES_PER_ROW * len(message.identities), self._store.log
        entries = await off_loop(executor, work, log.those_of, log.entries(message.shard), message.identities)
        most = min(max(1, MAX_BATCH_BYTES // (4 * size)), MAX_DELTAS) if size else MAX_BATCHES
        batch = [(message.shard, entry) for entry in entries[:most]]
        size = sum(len(entry.payload) for _, entry in batch)
        described = FoundDeltas([as_message(*one) for one in batch])
        return Response(encode(described), list_if_small(logged_bodies(batch, is_batch=self._store.holds_values), size))


def as_message(shard: int, entry: LogEntry) -> LoggedDelta:
    """A logged delta, as it is offered."""
    return LoggedDelta(shard, *entry.identity, entry.weight, max(1.0, entry.workers))


def logged_bodies(entries: Iterable[tuple[int, LogEntry]], *, is_batch: bool) -> Iterator[Buffer]:
    """The frames of logged deltas, each with its shard. `is_batch`: they are batches of named values."""
    for shard, entry in entries:
        yield from logged_frames(shard, bytes(entry.payload), entry.codec, entry.identity.step, is_batch=is_batch)
