"""Tells other members whom this node has left out for audits, and hears it of them.

Without it each member finds a lying owner by its own audits only. Meanwhile some have left it out and others have not:
the first find no owner of a shard that the others take from the lying one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from overlay.peers import Contact
from overlay.transport import Buffer, Response, TransportError
from training.exchange.audit_messages import AuditVerdict, AuditVerdictAnswer
from training.exchange.context import ExchangeContext
from training.exchange.directory import PARTNER_TIMEOUT_S, OwnerDirectory
from training.exchange.messages import encode


class AuditVerdicts:
    """Those of one node."""

    def __init__(self, context: ExchangeContext, directory: OwnerDirectory) -> None:
        self._context = context
        self._view = context.view
        self._audits = context.audits
        self._rpc = context.rpc
        self._clock = context.environment.clock
        self._log = context.environment.log
        self._directory = directory
        context.rpc.register("audit_verdict", AuditVerdict, self._on_verdict)

    def due(self) -> list[tuple[bytes, bool]]:
        """The members that this node has left out since the last call, and whether it followed others in it."""
        due, self._audits.verdicts_due = self._audits.verdicts_due, []
        return due

    async def tell(self, verdicts: list[tuple[bytes, bool]]) -> None:
        """Tell all members of a small swarm, or the candidates of the shards that these own."""
        known_owners = self._context.store.ownership.known_owners
        for member, follows in verdicts:
            owned = [shard for shard, known in known_owners.items() if known.owner.node_id == member]
            hearers = await self._directory.hearers(owned)
            message = AuditVerdict(self._context.genesis, member, follows)
            await asyncio.gather(*(self._tell(to, message) for to in hearers if to.node_id != member))

    async def _tell(self, to: Contact, message: AuditVerdict) -> None:
        try:
            await self._rpc.ask(to, "audit_verdict", message, AuditVerdictAnswer, PARTNER_TIMEOUT_S)
        except TransportError as error:
            self._log.debug("audit_unanswered", owner=to.node_id.hex()[:8], reason=str(error))

    async def _on_verdict(self, sender: Contact, message: AuditVerdict, _stream: AsyncIterator[Buffer]) -> Response:
        """Another member has left one out: this node audits that one at each push, and needs less of its own."""
        trust, now_s = self._view.trust, self._clock.monotonic()
        is_own = sender.node_id == message.member
        if not is_own and sender.node_id in trust and message.member in trust:
            self._audits.verdict(message.member, sender.node_id, now_s, follows=message.follows)
            self._audits.watch(message.member, sender.node_id, now_s)
            self._context.heed_verdicts(message.member)
        return Response(encode(AuditVerdictAnswer(message.member not in trust)))
