"""Sends the audit message to an owner, or to a backup."""

from __future__ import annotations

from overlay.peers import Contact
from overlay.transport import TransportError
from training.exchange.audit_messages import Audit, AuditAnswer, AuditedDelta, AuditResult
from training.exchange.context import ExchangeContext
from training.exchange.directory import PARTNER_TIMEOUT_S

#: Deltas of one question.
MAX_ASKED = 1024


class AuditQuestions:
    """The questions of one node about its own deltas, those of its present start."""

    def __init__(self, context: ExchangeContext) -> None:
        self._context = context
        self._rpc = context.rpc
        self._log = context.environment.log

    async def ask(
        self, to: Contact, deltas: list[AuditedDelta], owner: bytes = b"", *, is_repeated: bool = False
    ) -> dict[tuple[int, int], AuditResult] | None:
        """The answers by shard and step; None if there are none, which says nothing."""
        question = Audit(self._context.genesis, self._context.run.incarnation, deltas, owner, is_repeated)
        try:
            answer = await self._rpc.ask(to, "audit", question, AuditAnswer, PARTNER_TIMEOUT_S)
        except TransportError as error:
            self._log.debug("audit_unanswered", owner=to.node_id.hex()[:8], reason=str(error))
            return None
        return {(result.shard, result.step): result for result in answer.results}
