"""Sends acknowledged deltas again, under the same identity, where the owner of a shard lacks them.

The owner that acknowledged them has added nothing, or another delta, if it lied; or it had them and has lost them, with
all copies. It may be the same node, started again from its disk. The present owner is asked which of them it has: as a
rule all, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from overlay.peers import Contact
from overlay.transport import TransportError
from training.encoding.frames import Part, encoded_frames, framed_bytes, sized
from training.exchange.audit.questions import MAX_ASKED, AuditQuestions
from training.exchange.audit_messages import AuditedDelta, AuditResult
from training.exchange.audit_records.acknowledged import Acknowledged, AcknowledgedKey
from training.exchange.context import ExchangeContext
from training.exchange.messages import PushStatus
from training.exchange.owner.delta_item import IncomingDelta
from training.exchange.owner.deltas import DeltaHandler
from training.exchange.ownership_messages import LoggedDelta, OfferedDeltas, OfferedDeltasAnswer

#: Encoded bytes that are sent again at a time, and how often at most.
MAX_SENT_BYTES, EVERY_S = 4 << 20, 1.0

#: Deltas by the present owner of their shards.
Moved = dict[bytes, tuple[Contact, list[AcknowledgedKey]]]


class Resending:
    """What one node sends again."""

    def __init__(self, context: ExchangeContext, deltas: DeltaHandler) -> None:
        self._context = context
        self._store = context.store
        self._view = context.view
        self._rpc = context.rpc
        self._log = context.environment.log
        self._kept = context.acknowledged
        self._deltas = deltas
        self._questions = AuditQuestions(context)
        self._clock = context.environment.clock
        self._next_s = 0.0

    def due(self) -> Moved:
        """The deltas whose shards have another owner than the one that acknowledged them."""
        moved: Moved = {}
        now_s = self._clock.monotonic()
        if self._store.holds_values or now_s < self._next_s:
            return moved
        self._next_s = now_s + EVERY_S
        if not (owners := self._owners_of_moved()):
            return moved
        incarnation = self._context.run.incarnation
        for key, found in self._kept:
            owner = owners.get(key.shard)
            if owner is None or owner.node_id == found.owner or found.encoded is None:
                continue
            theirs = moved.setdefault(owner.node_id, (owner, []))[1]
            if key.identity.incarnation == incarnation and len(theirs) < MAX_ASKED:
                theirs.append(key)
        return moved

    def _owners_of_moved(self) -> dict[int, Contact]:
        """The present owners of the shards of which another one has acknowledged a delta. There are a few hundred
        shards, and many thousand deltas."""
        found: dict[int, Contact] = {}
        for shard, acknowledged in self._kept.owners():
            owner = self._owner_of(shard, acknowledged)
            if owner is not None:
                found[shard] = owner
        return found

    def _owner_of(self, shard: int, acknowledged: Collection[bytes]) -> Contact | None:
        """The present owner, if it lives, is trusted, and is not the only one that has acknowledged deltas."""
        if shard in self._store.owned:
            return self._context.me()
        known = self._store.ownership.known_owners.get(shard)
        if known is None or known.owner.node_id == self._context.swarm.node_id:
            return None
        if len(acknowledged) == 1 and known.owner.node_id in acknowledged:
            return None
        return None if self._view.is_gone(known.owner.node_id) else known.owner

    async def send(self, moved: Moved) -> None:
        """Have the new owners add what they lack."""
        for owner, keys in moved.values():
            await self._follow(owner, keys)

    async def _follow(self, owner: Contact, keys: list[AcknowledgedKey]) -> None:
        """Have the new owner of shards add what it lacks."""
        if owner.node_id == self._context.swarm.node_id:
            lacking = [key for key in keys if self._is_lacking_here(key)]
        else:
            results = await self._questions.ask(owner, [AuditedDelta(key.shard, key.identity.step) for key in keys])
            if results is None:
                return
            found = {key: results.get((key.shard, key.identity.step)) for key in keys}
            keys = [key for key, result in found.items() if result is not None and result.is_owner]
            lacking = [key for key in keys if self._is_missed(key, found[key])]
        missing = dict.fromkeys(lacking)
        for key in keys:
            if key not in missing:
                self._kept.moved(key, owner.node_id)
        while lacking and await self.send_again(owner, lacking):
            lacking = [key for key in lacking if self._is_unsent(key, owner)]

    def _is_unsent(self, key: AcknowledgedKey, owner: Contact) -> bool:
        delta = self._kept.find(key)
        return delta is not None and delta.owner != owner.node_id

    def _is_missed(self, key: AcknowledgedKey, result: AuditResult | None) -> bool:
        """Whether an owner certainly lacks a delta, as it says."""
        delta = self._kept.find(key)
        return delta is not None and result is not None and result.misses(delta.push.base_step)

    def _is_lacking_here(self, key: AcknowledgedKey) -> bool:
        owned, delta = self._store.owned.get(key.shard), self._kept.find(key)
        if owned is None or delta is None or owned.state.knows(key.identity):
            return False
        return not owned.state.may_have_forgotten(key.identity) and delta.push.base_step >= owned.state.era_step

    async def send_again(self, owner: Contact, keys: list[AcknowledgedKey]) -> int:
        """Have an owner add acknowledged deltas that it lacks, however old; returns how many it has acknowledged."""
        found, size = list[tuple[AcknowledgedKey, Acknowledged]](), 0
        for key in keys:
            delta = self._kept.find(key)
            if delta is not None and delta.encoded is not None and size + delta.size_bytes <= MAX_SENT_BYTES:
                size += delta.size_bytes
                found.append((key, delta))
        if not found:
            return 0
        if owner.node_id == self._context.swarm.node_id:
            outcomes = [await self._accept_own(key, delta) for key, delta in found]
        else:
            outcomes = await self._mend(owner, found)
        for (key, _), outcome in zip(found, outcomes, strict=True):
            if outcome == "ok":
                self._kept.moved(key, owner.node_id)
            elif outcome == "refused":
                self._kept.drop(key)
        added, refused = outcomes.count("ok"), outcomes.count("refused")
        self._context.counters.sent_again += added
        if added or refused:
            self._log.warning("deltas_sent_again", count=added, refused=refused)
        return added

    async def _accept_own(self, key: AcknowledgedKey, delta: Acknowledged) -> PushStatus:
        item = IncomingDelta.received(key.shard, delta.encoded or b"", delta.codec, delta.values)
        item.repair = True
        push = msgspec.structs.replace(delta.push, genesis=self._context.genesis, shards=[key.shard])
        (result,) = await self._deltas.accept(push, [item])
        return result.status

    async def _mend(self, owner: Contact, found: list[tuple[AcknowledgedKey, Acknowledged]]) -> list[PushStatus]:
        """Send them as what repairs a split, which may be old, and moves no momentum."""
        # Of the count that a weight was made with and that of now the larger one is nearer to the owner's, which lowers
        # the weight by the quotient: a node that has just lost and found its owner counts few.
        workers = max(1.0, self._view.worker_count())
        message = OfferedDeltas(
            self._context.genesis,
            [
                LoggedDelta(key.shard, *key.identity, delta.push.weight, max(workers, delta.push.workers))
                for key, delta in found
            ],
        )
        frames = (
            buffer
            for key, delta in found
            for buffer in encoded_frames(
                key.shard, delta.encoded or b"", delta.codec, Part.DELTA, step=key.identity.step
            )
        )
        size = sum(framed_bytes(delta.codec, delta.values, delta.size_bytes) for _, delta in found)
        try:
            async with self._rpc.request("mend", owner, message, sized(frames, size)) as answer:
                result = await self._rpc.decoded(owner, answer.head, OfferedDeltasAnswer)
        except TransportError as error:
            self._log.debug("deltas_not_sent_again", owner=owner.node_id.hex()[:8], reason=str(error))
            return ["retry"] * len(found)
        refused = dict.fromkeys(result.refused)
        rest: PushStatus = "ok" if result.added + len(refused) >= len(found) else "retry"
        return ["refused" if place in refused else rest for place in range(len(found))]
