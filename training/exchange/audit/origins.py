"""Asks living nodes whether deltas that another member offers in a repair are theirs, and answers such questions.

A forged delta would take the place of the true one, whose push is acknowledged then because its identity is known. An
audit of the true one would find that the owner has forwarded something else, and blame the owner, which has taken the
repair in good faith. So nothing is added under the identity of a living node that says that it has made another delta,
or none yet. A node that is gone, that no stream reaches, or of a version before this question, cannot be asked: what is
offered is believed then, and the owner compares it with what that node pushes later (`training.exchange.owner.deltas`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from overlay.peers import Contact
from overlay.transport import NOT_SERVED, Buffer, Response, TransportError
from training.exchange.audit.answers import MAX_HASHED_BYTES, Encoded, digest_of
from training.exchange.audit_messages import AuditAnswer, AuditedDelta, AuditResult, ConfirmDeltas, Known
from training.exchange.audit_records.acknowledged import AcknowledgedKey
from training.exchange.context import ExchangeContext
from training.exchange.directory import QUESTION_TIMEOUT_S
from training.exchange.messages import encode
from training.exchange.step_wait import together
from training.shards.applied import DeltaId


class OfferedDelta(NamedTuple):
    """One shard of a delta that a member other than its origin offers."""

    shard: int
    identity: DeltaId
    encoded: Encoded


class DeltaOrigins:
    """What one node asks about deltas of others, and answers about its own."""

    def __init__(self, context: ExchangeContext) -> None:
        self._context = context
        self._swarm = context.swarm
        self._executor = context.environment.executor
        self._log = context.environment.log
        context.rpc.register("confirm_deltas", ConfirmDeltas, self._on_question)

    # -- questions ----------------------------------------------------------------------------------------------

    async def ask(self, deltas: Sequence[OfferedDelta]) -> list[Known | None]:
        """What the origin of each says: `has`, `differs` where it has made another one, `lacks` where it has made none
        yet; `forgotten` where nobody can tell. None: it has not answered."""
        found: list[Known | None] = ["forgotten"] * len(deltas)
        by_start: dict[tuple[bytes, int], dict[tuple[int, int], int]] = {}
        for place, delta in enumerate(deltas):
            if self._may_tell(delta.identity.node):
                found[place] = None
                # An answer has no digest: of two deltas under one identity the second is not asked about.
                by_start.setdefault(delta.identity[:2], {}).setdefault((delta.shard, delta.identity.step), place)
        if not by_start:
            return found
        digests = await self._executor.run(lambda: [digest_of(delta.encoded) for delta in deltas])

        async def ask(start: tuple[bytes, int], places: dict[tuple[int, int], int]) -> None:
            asked = [AuditedDelta(shard, step, digests[place]) for (shard, step), place in places.items()]
            message = ConfirmDeltas(self._context.genesis, start[1], asked)
            is_own = start[0] == self._swarm.node_id
            results = await self._answer(message) if is_own else await self._ask(start[0], message)
            for one in results:
                if (place := places.get((one.shard, one.step))) is not None:
                    found[place] = one.known

        await together(ask(start, places) for start, places in by_start.items())
        return found

    def _may_tell(self, node: bytes) -> bool:
        if node == self._swarm.node_id:
            return True
        peer = self._swarm.peers.get(node)
        return peer is not None and peer.eligible and not self._context.view.is_gone(node)

    async def _ask(self, node: bytes, message: ConfirmDeltas) -> list[AuditResult]:
        if (contact := self._swarm.contact(node)) is None:
            return []
        try:
            answer = await self._context.rpc.ask(contact, "confirm_deltas", message, AuditAnswer, QUESTION_TIMEOUT_S)
        except TransportError as error:
            self._log.debug("audit_unanswered", owner=node.hex()[:8], reason=str(error))
            if error.kind == "rejected" and error.detail.startswith(NOT_SERVED):
                return [AuditResult(one.shard, one.step, "forgotten") for one in message.deltas]
            return []
        return answer.results

    # -- answers ------------------------------------------------------------------------------------------------

    async def _on_question(self, _sender: Contact, message: ConfirmDeltas, _stream: AsyncIterator[Buffer]) -> Response:
        return Response(encode(AuditAnswer(await self._answer(message))))

    async def _answer(self, message: ConfirmDeltas) -> list[AuditResult]:
        """Of deltas of this node. What is to be compared is bounded: of the rest nothing is said."""
        results, compared, room = list[AuditResult](), list[tuple[AuditedDelta, Encoded]](), MAX_HASHED_BYTES
        for delta in message.deltas:
            identity = DeltaId(self._swarm.node_id, message.incarnation, delta.step)
            encoded = self._encoded(delta.shard, identity)
            if encoded is None:
                results.append(AuditResult(delta.shard, delta.step, self._known(identity)))
            elif not compared or len(encoded) <= room:
                room -= len(encoded)
                compared.append((delta, encoded))
        digests = await self._executor.run(lambda: [digest_of(encoded) for _, encoded in compared])
        for (delta, _), digest in zip(compared, digests, strict=True):
            results.append(AuditResult(delta.shard, delta.step, "has" if digest == delta.digest else "differs"))
        return results

    def _encoded(self, shard: int, identity: DeltaId) -> Encoded | None:
        """A delta of this node as it was sent, or will be; None where it is not kept."""
        if (kept := self._context.kept.find(identity, shard)) is not None:
            return kept[0]
        found = self._context.acknowledged.find(AcknowledgedKey(shard, identity))
        return None if found is None else found.encoded

    def _known(self, identity: DeltaId) -> Known:
        start = identity.incarnation, identity.step
        is_later = start > self._context.kept.newest
        return "lacks" if is_later and identity.incarnation >= self._context.run.incarnation else "forgotten"
