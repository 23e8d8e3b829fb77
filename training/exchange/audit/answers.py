"""Answers an audit: whether this node, as owner or backup, has deltas of the member that asks.

A backup that lacks one which the owner says it has, and says that this node backs up, has heard a complaint: the owner
or the member that asks does not tell the truth (`training.exchange.audit_records.outcomes`).
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator

from overlay.peers import Contact
from overlay.transport import Buffer, Response
from training.exchange.audit_messages import Audit, AuditAnswer, AuditedDelta, AuditResult, Known
from training.exchange.context import ExchangeContext
from training.exchange.messages import encode
from training.shards.applied import DeltaId
from training.shards.state import ShardState

DIGEST_BYTES = 8
#: Encoded bytes of which digests are made for one audit; of the rest only the identities are compared.
MAX_HASHED_BYTES = 1 << 20
#: A node that was started again may have been a backup before, and its owners may not have heard of it yet.
STARTED_S = 30.0

Encoded = bytes | bytearray | memoryview


def digest_of(encoded: Encoded) -> bytes:
    """Of one encoded shard of a delta, as it is pushed and forwarded."""
    return hashlib.blake2b(encoded, digest_size=DIGEST_BYTES).digest()


class AuditAnswers:
    """What one node answers."""

    def __init__(self, context: ExchangeContext) -> None:
        self._context = context
        self._store = context.store
        self._clock = context.environment.clock
        self._started_s = context.environment.clock.monotonic()
        context.rpc.register("audit", Audit, self._on_audit)

    async def _on_audit(self, sender: Contact, message: Audit, _stream: AsyncIterator[Buffer]) -> Response:
        results, hashed = [], 0
        for delta in message.deltas:
            identity = DeltaId(sender.node_id, message.incarnation, delta.step)
            result, size_bytes = self._result(delta, identity, MAX_HASHED_BYTES - hashed)
            hashed += size_bytes
            results.append(result)
        if message.is_repeated and any(self._is_missed(result, message.owner) for result in results):
            self._complained(sender.node_id, message.owner)
        return Response(encode(AuditAnswer(results)))

    def _result(self, delta: AuditedDelta, identity: DeltaId, room: int) -> tuple[AuditResult, int]:
        """What is known of one delta, and how many bytes were hashed for it."""
        shard, step = delta.shard, delta.step
        if (owned := self._store.owned.get(shard)) is not None:
            partner = (owned.target_ids() or (b"",))[0]
            known = _known(owned.state, identity)
            return AuditResult(shard, step, known, True, *owned.term, partner, owned.state.era_step), 0
        backed = self._store.backed.get(shard)
        if backed is None:
            return AuditResult(shard, step, "other"), 0
        partner = backed.owner.node_id
        if backed.state is None or not backed.is_active:
            return AuditResult(shard, step, "forgotten", False, *backed.term, partner), 0
        known = _known(backed.state, identity)
        entry = self._store.log.find(shard, identity) if known == "has" and delta.digest else None
        if entry is None or len(entry.payload) > room:
            return AuditResult(shard, step, known, False, *backed.term, partner), 0
        if digest_of(entry.payload) != delta.digest:
            known = "differs"
        return AuditResult(shard, step, known, False, *backed.term, partner), len(entry.payload)

    def _is_missed(self, result: AuditResult, owner: bytes) -> bool:
        """Whether this node, which the owner names as its backup, lacks a delta, or is no backup of it."""
        if result.is_owner:
            return False  # it has taken over: the owner has not heard of it yet
        if result.known == "other" or result.partner != owner:
            is_new = self._clock.monotonic() - self._started_s < STARTED_S
            return not is_new and not self._context.run.is_leaving
        return result.known in ("lacks", "differs")

    def _complained(self, accuser: bytes, owner: bytes) -> None:
        trust = self._context.view.trust
        if accuser == owner or accuser not in trust or owner not in trust:
            return
        self._context.counters.audits_failed += 1
        source = owner.hex()[:8]
        self._context.environment.log.info("owner_audit_failed", source=source, reason="complaint")
        if self._context.audits.complaint(owner, accuser, self._clock.monotonic()):
            self._context.fail_audit(owner)
        self._context.heed_verdicts(owner)


def _known(state: ShardState, identity: DeltaId) -> Known:
    if state.knows(identity):
        return "has"
    return "forgotten" if state.may_have_forgotten(identity) else "lacks"
