"""States and offices that come to this node: it is taught as a backup, made the owner, or told that it is neither now.

Says of each shard what it took, and of the others who it believes is the owner.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from overlay.peers import Contact
from overlay.transport import Buffer, Response
from training.encoding.frames import FrameReader
from training.exchange.context import ExchangeContext
from training.exchange.messages import Closing, HandOver, Learn, Release, StateTransfer, TransferResult, encode
from training.exchange.store import state_stream
from training.exchange.terms import OwnerInfo


class _Take(Protocol):
    """Type of the per-shard decision inside `_verdict`."""

    def __call__(self, where: OwnerInfo, sender: Contact) -> bool: ...


class BackupHandler:
    """Takes what owners hand over."""

    def __init__(self, context: ExchangeContext) -> None:
        self._context = context
        self._store = context.store
        self._run = context.run
        self._rpc = context.rpc
        self._rebalance = context.rebalance
        self._clock = context.environment.clock
        self._log = context.environment.log

    def register(self) -> None:
        """Put the handlers behind the overlay's door."""
        self._rpc.register("learn", Learn, self._on_learn)
        self._rpc.register("state", StateTransfer, self._on_state)
        self._rpc.register("hand_over", HandOver, self._on_hand_over)
        self._rpc.register("release", Release, self._on_release)

    async def _on_learn(self, sender: Contact, message: Learn, _stream: AsyncIterator[Buffer]) -> Response:
        attempts = {where.shard: number for where, number in zip(message.shards, message.attempts, strict=False)}

        def take(where: OwnerInfo, sender: Contact) -> bool:
            attempt = attempts.get(where.shard)
            if attempt is None or self._run.is_leaving:
                return False
            return self._store.learn(where.shard, where.term, sender, attempt)

        return Response(encode(self._verdict(sender, message.shards, take)))

    def _verdict(self, sender: Contact, wheres: list[OwnerInfo], take: _Take) -> TransferResult:
        taken, others = [], []
        for where in wheres:
            if take(where, sender):
                taken.append(where.shard)
            elif (known := self._store.ownership.owner_info(where.shard)) is not None:
                others.append(known)
        return TransferResult(taken, others)

    async def _on_state(self, sender: Contact, message: StateTransfer, stream: AsyncIterator[Buffer]) -> Response:
        reader = FrameReader(stream)
        taken = []
        for head in message.states:
            state = await state_stream.read_state(reader, head, self._store)
            if self._store.take_state(head.shard, head.term, sender, state):
                taken.append(head.shard)
        return Response(encode(TransferResult(taken, [])))

    async def _on_hand_over(self, sender: Contact, message: HandOver, _stream: AsyncIterator[Buffer]) -> Response:
        known = {where.shard: count for where, count in zip(message.shards, message.known, strict=False)}
        closings = {where.shard: windows for where, windows in zip(message.shards, message.closings, strict=False)}

        def take(where: OwnerInfo, sender: Contact) -> bool:
            return self._become_owner(where, sender, known.get(where.shard, -1), closings.get(where.shard, []))

        verdict = self._verdict(sender, message.shards, take)
        if verdict.taken:
            self._log.info("shards_received", count=len(verdict.taken), source=sender.node_id.hex()[:8])
            self._rebalance.wake()
        return Response(encode(verdict))

    def _become_owner(self, where: OwnerInfo, sender: Contact, known: int, closings: list[Closing]) -> bool:
        mine = self._store.owned.get(where.shard)
        if mine is not None and mine.term == where.term:
            return True  # the answer to the first hand-over was lost
        backed = self._store.backed.get(where.shard)
        if backed is None or backed.state is None or backed.owner.node_id != sender.node_id:
            return False
        # A hand-over right after the switch may come before any delta has put this backup into office.
        appointed = backed.promised is not None and where.term.number == backed.promised.number + 1
        if self._run.is_leaving or not (backed.in_office or appointed):
            return False
        if where.term < self._store.ownership.fence(where.shard) or not self._store.follow(where.shard, closings):
            return False
        now = self._clock.monotonic()
        owned = self._store.own(where.shard, backed.state, where.term, self._context.me(), now, tenured=True)
        # It may lack a delta whose acknowledgement got lost on the way to it: then it must be taught again.
        owned.backup = sender if self._context.settings.replicas else None
        if owned.backup is not None and known != owned.state.known_count:
            self._store.drop_backup(where.shard, self._context.me())
        if self._context.synchronous:
            self._store.fold(where.shard, self._run.passed_step)
        return True

    async def _on_release(self, sender: Contact, message: Release, _stream: AsyncIterator[Buffer]) -> Response:
        return Response(encode(self._verdict(sender, message.shards, self._release)))

    def _release(self, where: OwnerInfo, sender: Contact) -> bool:
        return self._store.release(where.shard, where.term, sender)
