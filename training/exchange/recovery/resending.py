"""Sends acknowledged deltas again, under the same identity, where the owner of a shard lacks them.

The owner that acknowledged them has lost them, with all copies: it was started again from its disk, or it has died with
its backup. The present owner is asked which of them it lacks: as a rule none, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import Buffer, Response, TransportError
from p2pnode.training.encoding.frames import Part, encoded_frames, sized
from p2pnode.training.exchange.counters import Counters
from p2pnode.training.exchange.directory import PARTNER_TIMEOUT_S
from p2pnode.training.exchange.messages import PushStatus, encode
from p2pnode.training.exchange.own_deltas import Acknowledged, AcknowledgedKey, SentDeltas
from p2pnode.training.exchange.owner.deltas import DeltaHandler
from p2pnode.training.exchange.ownership_messages import (
    MAX_ASKED,
    AskedDelta,
    FindLacking,
    LackingDeltas,
    LoggedDelta,
    OfferedDeltas,
    OfferedDeltasAnswer,
)
from p2pnode.training.exchange.rpc import ExchangeRpc
from p2pnode.training.exchange.run_state import RunState
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.swarm_view import SwarmView
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.swarm import Swarm

#: Encoded bytes that are sent again at a time, and how often at most.
MAX_SENT_BYTES, EVERY_S = 4 << 20, 1.0

#: Deltas by the present owner of their shards.
Moved = dict[bytes, tuple[Contact, list[AcknowledgedKey]]]


@dataclass(eq=False)
class Resending:
    """What one node sends again, and what it says of deltas that others may have to send again."""

    swarm: Swarm
    sent: SentDeltas
    store: ShardStore
    view: SwarmView
    run: RunState
    rpc: ExchangeRpc
    deltas: DeltaHandler
    counters: Counters
    environment: Environment

    def __post_init__(self) -> None:
        self._clock = self.environment.clock
        self._log = self.environment.log
        self._next_s = 0.0
        self.rpc.register("lacking", FindLacking, self._on_question)

    def due(self) -> Moved:
        """The deltas whose shards have another owner than the one that acknowledged them."""
        moved: Moved = {}
        now_s = self._clock.monotonic()
        if self.store.holds_values or now_s < self._next_s:
            return moved
        self._next_s = now_s + EVERY_S
        pairs = [(shard, former, self._owner(shard)) for shard, former in self.sent.owners()]
        owners = {
            (shard, former): owner
            for shard, former, owner in pairs
            if owner is not None and owner.node_id != former and not self.view.is_gone(owner.node_id)
        }
        for key, found in self.sent.acknowledged.items() if owners else ():
            owner = owners.get((key.shard, found.owner))
            if owner is not None and key.identity.incarnation == self.run.incarnation:
                theirs = moved.setdefault(owner.node_id, (owner, []))[1]
                if len(theirs) < MAX_ASKED:
                    theirs.append(key)
        return moved

    def _owner(self, shard: int) -> Contact | None:
        if shard in self.store.owned:
            return Contact(self.swarm.node_id, self.swarm.address)
        known = self.store.ownership.known_owners.get(shard)
        return None if known is None or known.owner.node_id == self.swarm.node_id else known.owner

    async def send(self, moved: Moved) -> None:
        """Have the present owners add what they lack."""
        for owner, keys in moved.values():
            try:
                lacking = await self._lacking(owner, keys)
                while lacking and await self._send_some(owner, lacking):
                    lacking = [
                        key
                        for key in lacking
                        if (one := self.sent.acknowledged.get(key)) is not None and one.owner != owner.node_id
                    ]
            except TransportError as error:
                self._log.debug("deltas_not_sent_again", owner=owner.node_id.hex()[:8], reason=str(error))

    async def _lacking(self, owner: Contact, keys: list[AcknowledgedKey]) -> list[AcknowledgedKey]:
        """Those of the deltas that the present owner lacks. Raises `TransportError`."""
        asked = {key: found for key in keys if (found := self.sent.acknowledged.get(key)) is not None}
        deltas = [AskedDelta(key.shard, key.identity.step, found.push.base_step) for key, found in asked.items()]
        question = FindLacking(self.run.incarnation, deltas)
        if owner.node_id == self.swarm.node_id:
            answer = self._answer(owner.node_id, question)
        else:
            answer = await self.rpc.ask(owner, "lacking", question, LackingDeltas, PARTNER_TIMEOUT_S)
        places, not_owned = dict.fromkeys(answer.lacking), dict.fromkeys(answer.not_owned)
        for place, key in enumerate(asked):
            if place not in places and key.shard not in not_owned:
                self.sent.moved(key, owner.node_id)
        return [key for place, key in enumerate(asked) if place in places]

    async def _send_some(self, owner: Contact, keys: Sequence[AcknowledgedKey]) -> bool:
        """Have an owner add the first of the deltas that it lacks, however old; returns whether it has added any.
        Raises `TransportError`."""
        found, size = dict[AcknowledgedKey, Acknowledged](), 0
        for key in keys:
            if (one := self.sent.acknowledged.get(key)) is not None and (not found or size < MAX_SENT_BYTES):
                found[key] = one
                size += one.size_bytes
        is_own = owner.node_id == self.swarm.node_id
        outcomes = [await self._accept(one) for one in found.values()] if is_own else await self._mend(owner, found)
        for key, outcome in zip(found, outcomes, strict=True):
            if outcome == "ok":
                self.sent.moved(key, owner.node_id)
            elif outcome == "refused":
                self.sent.drop(key)
        added, refused = outcomes.count("ok"), outcomes.count("refused")
        self.counters.sent_again += added
        if added or refused:
            self._log.warning("deltas_sent_again", count=added, refused=refused)
        return added > 0

    async def _accept(self, delta: Acknowledged) -> PushStatus:
        item = delta.item.item()
        item.repair = True
        push = msgspec.structs.replace(delta.push, shards=[item.shard])
        (result,) = await self.deltas.accept(push, [item])
        return result.status

    async def _mend(self, owner: Contact, found: dict[AcknowledgedKey, Acknowledged]) -> list[PushStatus]:
        """Send them as what repairs a split, which may be old, and moves no momentum."""
        # Of the count that a weight was made with and that of now the larger one is nearer to the owner's, which lowers
        # the weight by the quotient: a node that has just lost and found its owner counts few.
        workers = max(1.0, self.view.worker_count())
        message = OfferedDeltas(
            [
                LoggedDelta(key.shard, *key.identity, one.push.weight, max(workers, one.push.workers))
                for key, one in found.items()
            ],
        )
        frames = (
            buffer
            for key, one in found.items()
            for buffer in encoded_frames(
                key.shard, one.item.encoded, one.item.codec, Part.DELTA, step=key.identity.step
            )
        )
        size = sum(one.item.framed_bytes for one in found.values())
        async with self.rpc.request("repair", owner, message, sized(frames, size)) as answer:
            result = self.rpc.decoded(owner, answer.head, OfferedDeltasAnswer)
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
            if (owned := self.store.owned.get(delta.shard)) is None:
                not_owned[delta.shard] = None
                continue
            state, identity = owned.state, DeltaId(node, message.incarnation, delta.step)
            is_known = state.knows(identity) or state.may_have_forgotten(identity)
            if not is_known and delta.base_step >= state.era_step:
                lacking.append(place)
        return LackingDeltas(list(not_owned), lacking)
