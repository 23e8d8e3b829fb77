"""Backups that hear nothing ask their owner whether it still counts on them.

An owner that goes on with another backup says so to the former one, but the word may be lost; an owner that lost its
shard to another side of a split says nothing. A copy that nobody adds to any more would then lie there for ever, and on
the day its owner dies look like that of the backup. So a backup asks about every copy that nothing has been added to
for `SILENT_S`: of a shard that its owner lost, the copy becomes one to be offered to the new owner (`mending`); of one
that its owner has and backs up elsewhere, it goes. So does a lesson: who promised to learn, too late for an owner whose
term had risen meanwhile, would wait for the state for ever.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from overlay.peers import Contact
from overlay.transport import Buffer, Response, TransportError
from training.exchange.context import ExchangeContext
from training.exchange.directory import QUESTION_TIMEOUT_S
from training.exchange.messages import encode
from training.exchange.ownership_messages import ConfirmBackup, TransferResult
from training.exchange.store.records import Backed
from training.exchange.terms import OwnerInfo, Term

#: Within a step or a few, where steps are long: the question is small, and one is asked for all shards of an owner.
SILENT_S = 5.0

#: What changes when the owner speaks: its term, and how many deltas the copy has; of a lesson, how many wait for it.
Mark = tuple[bytes, Term, int]


class BackupConfirmation:
    """Both sides of the question."""

    def __init__(self, context: ExchangeContext) -> None:
        self._context = context
        self._store = context.store
        self._view = context.view
        self._rpc = context.rpc
        self._clock = context.environment.clock
        self._log = context.environment.log
        #: What each copy was like when it was last seen to change or asked about, and when.
        self._seen: dict[int, tuple[Mark, float]] = {}
        self._rpc.register("backing", ConfirmBackup, self._on_backing)

    def due(self) -> dict[bytes, tuple[Contact, list[int]]]:
        """The shards backed here whose living owners have been silent, by owner; also notes which were not."""
        now = self._clock.monotonic()
        silent: dict[bytes, tuple[Contact, list[int]]] = {}
        seen: dict[int, tuple[Mark, float]] = {}
        for shard, backed in self._store.backed.items():
            mark = _mark(backed)
            former, since = self._seen.get(shard, (None, now))
            if former != mark:
                since = now
            elif now - since >= SILENT_S and not backed.bereft and not self._view.is_gone(backed.owner.node_id):
                silent.setdefault(backed.owner.node_id, (backed.owner, []))[1].append(shard)
                since = now  # whatever comes of it, the next question is as far off
            seen[shard] = mark, since
        self._seen = seen
        return silent

    async def ask(self, silent: dict[bytes, tuple[Contact, list[int]]]) -> None:
        """Ask each owner about its shards, and do as it says. Who does not answer is liveness's to judge."""
        for owner, shards in silent.values():
            try:
                question = ConfirmBackup(self._context.genesis, shards)
                answer = await self._rpc.ask(owner, "backing", question, TransferResult, QUESTION_TIMEOUT_S)
            except TransportError as error:
                self._log.debug("backing_not_confirmed", owner=owner.node_id.hex()[:8], reason=str(error))
                continue
            for where in answer.others:
                self._store.not_counted_on(where, owner)

    async def _on_backing(self, sender: Contact, message: ConfirmBackup, _stream: AsyncIterator[Buffer]) -> Response:
        taken: list[int] = []
        others: list[OwnerInfo] = []
        for shard in message.shards:
            if self._store.counts_on(shard, sender.node_id):
                taken.append(shard)
            elif (known := self._store.elsewhere(shard)) is not None:
                others.append(known)
        return Response(encode(TransferResult(taken, others)))


def _mark(backed: Backed) -> Mark:
    count = len(backed.waiting) if backed.state is None else backed.state.known_count
    return backed.owner.node_id, backed.term, count
