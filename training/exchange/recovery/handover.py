"""Hands shards over: the backup becomes the owner and this node its backup, in one round trip after a drain."""

from __future__ import annotations

from overlay.peers import Contact
from training.encoding.frames import sized
from training.exchange.context import ExchangeContext
from training.exchange.directory import PARTNER_TIMEOUT_S
from training.exchange.owner.deltas import DeltaHandler
from training.exchange.owner.publishing import Publisher
from training.exchange.ownership_messages import HandOver, TransferResult
from training.exchange.terms import OwnerInfo

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
        heads, changes, changes_bytes = self._publisher.heads_for(to.node_id, [info.shard for info in new_owners])
        message = HandOver(self._context.genesis, new_owners, known, heads)
        # Without an answer it is unknown which node owns: `moving` stays set, and the next tick asks again.
        body = sized(changes, changes_bytes) if changes_bytes else ()
        result = await self._rpc.ask(to, "hand_over", message, TransferResult, PARTNER_TIMEOUT_S, body)
        self._context.counters.bytes_sent += changes_bytes
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
                    self._publisher.hand_on(info.shard)
                    self._store.become_backup(info.shard, to, info.term)
                if not self._context.settings.replicas:
                    self._store.backed.pop(info.shard, None)
            elif owned is not None and owned.moving:
                self._store.drop_backup(info.shard, self._context.me())

    def _is_moving(self, info: OwnerInfo) -> bool:
        owned = self._store.owned.get(info.shard)
        return owned is not None and owned.moving and owned.promised == info.term_number
