"""A backup that receives nothing asks its owner whether it still counts as the backup.

An owner that changes its backup releases the former one, but that message may be lost. An owner that lost its shard to
the other side of a split sends nothing. The copy would then stay until the owner crashes, and count as that of the
backup. So a backup asks about each copy that has not changed for `CONFIRM_AFTER_S`. If the owner has another backup,
the copy is dropped. If the shard has another owner, the copy is offered to that one. A catch-up ends in the same way. A
learner that accepted it after the owner's term had risen would otherwise wait for the state until cancelled.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from overlay.peers import Contact
from overlay.transport import Buffer, Response, TransportError
from training.exchange.context import ExchangeContext
from training.exchange.directory import PARTNER_TIMEOUT_S
from training.exchange.messages import encode
from training.exchange.ownership_messages import ConfirmBackup, TransferResult
from training.exchange.store.records import Backed
from training.exchange.terms import OwnerInfo, Term

#: A step or a few, where steps are long. The request is small, and one covers all shards of an owner.
CONFIRM_AFTER_S = 5.0

#: What a message of the owner changes: its term, and the number of deltas in the copy, or in the buffer of a learner.
Mark = tuple[bytes, Term, int]


class BackupConfirmation:
    """Sends and answers `ConfirmBackup`."""

    def __init__(self, context: ExchangeContext) -> None:
        self._context = context
        self._store = context.store
        self._view = context.view
        self._rpc = context.rpc
        self._clock = context.environment.clock
        self._log = context.environment.log
        #: The mark of each copy, and when it last changed or was last asked about.
        self._seen: dict[int, tuple[Mark, float]] = {}
        self._rpc.register("backing", ConfirmBackup, self._on_backing)

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
                question = ConfirmBackup(self._context.genesis, shards)
                answer = await self._rpc.ask(owner, "backing", question, TransferResult, PARTNER_TIMEOUT_S)
            except TransportError as error:
                self._log.debug("backing_not_confirmed", owner=owner.node_id.hex()[:8], reason=str(error))
                continue
            for info in answer.others:
                self._store.drop_unconfirmed(info, owner, attempts.get(info.shard, 0))

    async def _on_backing(self, sender: Contact, message: ConfirmBackup, _stream: AsyncIterator[Buffer]) -> Response:
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
