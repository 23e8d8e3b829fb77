"""Sends acknowledged deltas again, under the same identity, where the owner of a shard lacks them.

The owner that acknowledged them has lost them, with all copies: it was started again from its disk, or it has died with
its backup. The present owner is asked which of them it lacks: as a rule none, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection

import msgspec

from overlay.peers import Contact
from overlay.transport import Buffer, Response, TransportError
from training.encoding.frames import Part, encoded_frames, framed_bytes, sized
from training.exchange.context import ExchangeContext
from training.exchange.directory import PARTNER_TIMEOUT_S
from training.exchange.messages import PushStatus, encode
from training.exchange.own_deltas import Acknowledged, AcknowledgedKey
from training.exchange.owner.delta_item import IncomingDelta
from training.exchange.owner.deltas import DeltaHandler
from training.exchange.ownership_messages import (
    MAX_ASKED,
    AskedDelta,
    FindLacking,
    LackingDeltas,
    LoggedDelta,
    OfferedDeltas,
    OfferedDeltasAnswer,
)
from training.shards.applied import DeltaId

#: Encoded bytes that are sent again at a time, and how often at most.
MAX_SENT_BYTES, EVERY_S = 4 << 20, 1.0

#: Deltas by the present owner of their shards.
Moved = dict[bytes, tuple[Contact, list[AcknowledgedKey]]]


class Resending:
    """What one node sends again, and what it says of deltas that others may have to send again."""

    def __init__(self, context: ExchangeContext, deltas: DeltaHandler) -> None:
        self._context = context
        self._store = context.store
        self._view = context.view
        self._rpc = context.rpc
        self._log = context.environment.log
        self._kept = context.acknowledged
        self._deltas = deltas
        self._clock = context.environment.clock
        self._next_s = 0.0
        self._rpc.register("lacking", FindLacking, self._on_question)

    def due(self) -> Moved:
        """The deltas whose shards have another owner than the one that acknowledged them."""
        moved: Moved = {}
        now_s = self._clock.monotonic()
        if self._store.holds_values or now_s < self._next_s:
            return moved
        self._next_s = now_s + EVERY_S
        self._kept.drop_old(now_s, self._view.is_gone)
        if not (owners := self._owners_of_moved()):
            return moved
        incarnation = self._context.run.incarnation
        for key, found in self._kept:
            owner = owners.get(key.shard)
            if owner is None or owner.node_id == found.owner:
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
        """The present owner, if it lives, and is not the only one that has acknowledged deltas."""
        if shard in self._store.owned:
            return self._context.me()
        known = self._store.ownership.known_owners.get(shard)
        if known is None or known.owner.node_id == self._context.swarm.node_id:
            return None
        if len(acknowledged) == 1 and known.owner.node_id in acknowledged:
            return None
        return None if self._view.is_gone(known.owner.node_id) else known.owner

    async def send(self, moved: Moved) -> None:
        """Have the present owners add what they lack."""
        for owner, keys in moved.values():
            await self._follow(owner, keys)

    async def _follow(self, owner: Contact, keys: list[AcknowledgedKey]) -> None:
        """Have the present owner of shards add what it lacks."""
        asked = {key: found for key in keys if (found := self._kept.find(key)) is not None}
        question = FindLacking(
            self._context.run.incarnation,
            [AskedDelta(key.shard, key.identity.step, found.push.base_step) for key, found in asked.items()],
        )
        if owner.node_id == self._context.swarm.node_id:
            answer = self._answer(owner.node_id, question)
        else:
            try:
                answer = await self._rpc.ask(owner, "lacking", question, LackingDeltas, PARTNER_TIMEOUT_S)
            except TransportError as error:
                self._log.debug("deltas_not_sent_again", owner=owner.node_id.hex()[:8], reason=str(error))
                return
        places, not_owned = dict.fromkeys(answer.lacking), dict.fromkeys(answer.not_owned)
        lacking = list[AcknowledgedKey]()
        for place, key in enumerate(asked):
            if place in places:
                lacking.append(key)
            elif key.shard not in not_owned:
                self._kept.moved(key, owner.node_id)
        while lacking and await self._send_again(owner, lacking):
            lacking = [key for key in lacking if self._is_unsent(key, owner)]

    def _is_unsent(self, key: AcknowledgedKey, owner: Contact) -> bool:
        delta = self._kept.find(key)
        return delta is not None and delta.owner != owner.node_id

    async def _send_again(self, owner: Contact, keys: list[AcknowledgedKey]) -> int:
        """Have an owner add acknowledged deltas that it lacks, however old; returns how many it has acknowledged."""
        found, size = list[tuple[AcknowledgedKey, Acknowledged]](), 0
        for key in keys:
            delta = self._kept.find(key)
            if delta is not None and size + delta.size_bytes <= MAX_SENT_BYTES:
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
        item = IncomingDelta.received(key.shard, delta.encoded, delta.codec, delta.values)
        item.repair = True
        push = msgspec.structs.replace(delta.push, shards=[key.shard])
        (result,) = await self._deltas.accept(push, [item])
        return result.status

    async def _mend(self, owner: Contact, found: list[tuple[AcknowledgedKey, Acknowledged]]) -> list[PushStatus]:
        """Send them as what repairs a split, which may be old, and moves no momentum."""
        # Of the count that a weight was made with and that of now the larger one is nearer to the owner's, which lowers
        # the weight by the quotient: a node that has just lost and found its owner counts few.
        workers = max(1.0, self._view.worker_count())
        message = OfferedDeltas(
            [
                LoggedDelta(key.shard, *key.identity, delta.push.weight, max(workers, delta.push.workers))
                for key, delta in found
            ],
        )
        frames = (
            buffer
            for key, delta in found
            for buffer in encoded_frames(key.shard, delta.encoded, delta.codec, Part.DELTA, step=key.identity.step)
        )
        size = sum(framed_bytes(delta.codec, delta.values, delta.size_bytes) for _, delta in found)
        try:
            async with self._rpc.request("mend", owner, message, sized(frames, size)) as answer:
                result = self._rpc.decoded(owner, answer.head, OfferedDeltasAnswer)
        except TransportError as error:
            self._log.debug("deltas_not_sent_again", owner=owner.node_id.hex()[:8], reason=str(error))
            return ["retry"] * len(found)
        refused = dict.fromkeys(result.refused)
        rest: PushStatus = "ok" if result.added + len(refused) >= len(found) else "retry"
        return ["refused" if place in refused else rest for place in range(len(found))]

    # -- answers ------------------------------------------------------------------------------------------------

    async def _on_question(self, sender: Contact, message: FindLacking, _stream: AsyncIterator[Buffer]) -> Response:
        return Response(encode(self._answer(sender.node_id, message)))

    def _answer(self, node: bytes, message: FindLacking) -> LackingDeltas:
        """Which deltas of a node the shards owned here certainly lack."""
        not_owned: dict[int, None] = {}
        lacking: list[int] = []
        for place, delta in enumerate(message.deltas):
            if (owned := self._store.owned.get(delta.shard)) is None:
                not_owned[delta.shard] = None
                continue
            state, identity = owned.state, DeltaId(node, message.incarnation, delta.step)
            is_known = state.knows(identity) or state.may_have_forgotten(identity)
            if not is_known and delta.base_step >= state.era_step:
                lacking.append(place)
        return LackingDeltas(list(not_owned), lacking)
