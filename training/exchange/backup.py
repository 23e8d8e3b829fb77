"""The backup of shards: takes forwarded deltas, states and hand-overs, and asks a silent owner whether it still counts.

Each answer lists the shards that were taken; for the others it names the owner that this node knows.

An owner that changes its backup sends nothing more to the former one. Nor does an owner that lost its shard to the
other side of a split. So a backup asks about each copy that has not changed for a while. If the owner has another
backup, the copy is dropped. If the shard has another owner, the copy is offered to that one. A catch-up ends in the
same way, if the learner accepted it after the owner's term had risen.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

import numpy as np

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import Buffer, Response, TransportError
from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.encoding.frames import FrameReader, Part, read_encoded
from p2pnode.training.encoding.table import CodecName
from p2pnode.training.exchange.delta import SentDeltas, read_item
from p2pnode.training.exchange.directory import PARTNER_TIMEOUT_S
from p2pnode.training.exchange.messages import (
    Forward,
    ForwardAnswer,
    Forwarded,
    ForwardResult,
    ForwardStatus,
    encode,
)
from p2pnode.training.exchange.owner.publishing import Publisher
from p2pnode.training.exchange.owner.replication import lacks_backup
from p2pnode.training.exchange.owner.validation import is_good
from p2pnode.training.exchange.ownership_messages import (
    HandOver,
    Learn,
    ShardList,
    TransferResult,
)
from p2pnode.training.exchange.peer_score import Nonsense
from p2pnode.training.exchange.rpc import ExchangeRpc
from p2pnode.training.exchange.run_state import Counters, RebalanceRequests, RunState
from p2pnode.training.exchange.store import shard_states
from p2pnode.training.exchange.store.records import Backed, BufferedDelta
from p2pnode.training.exchange.store.replica import Replica
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.swarm_view import SwarmView
from p2pnode.training.exchange.terms import OwnerInfo, Term
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.delta_range import is_delta_in_range
from p2pnode.training.swarm import Swarm

#: A step or a few, where steps are long. The request is small, and one covers all shards of an owner.
CONFIRM_AFTER_S = 3.0

#: What a message of the owner changes: its term, and the number of deltas in the copy, or in the buffer of a learner.
Mark = tuple[bytes, Term, int]
Encoded = bytes | bytearray | memoryview


@dataclass(eq=False)
class BackupHandler:
    """Receives deltas, states and roles from the owners of shards."""

    swarm: Swarm
    store: ShardStore
    replica: Replica
    view: SwarmView
    run: RunState
    rpc: ExchangeRpc
    rebalance: RebalanceRequests
    publisher: Publisher
    sent: SentDeltas
    counters: Counters
    environment: Environment
    #: Whether the former owner of a shard backs it up.
    has_backups: bool

    def __post_init__(self) -> None:
        self._clock = self.environment.clock
        self._executor = self.environment.executor
        self._log = self.environment.log
        #: The mark of each copy when the copies were last looked at.
        self._marks: dict[int, Mark] = {}
        self._looked_s = self._clock.monotonic()

    def register(self) -> None:
        """Register the request handlers."""
        self.rpc.register("forward", Forward, self._on_forward)
        self.rpc.register("learn", Learn, self._on_learn)
        self.rpc.register("state", ShardList, self._on_state)
        self.rpc.register("hand_over", HandOver, self._on_hand_over)
        self.rpc.register("backing", ShardList, self._on_backing)

    def _answer(self, shards: Iterable[int], taken: list[int]) -> TransferResult:
        left = dict.fromkeys(shards).keys() - taken
        return TransferResult(taken, [known for shard in sorted(left) if (known := self.store.redirect(shard))])

    # -- forwarded deltas ---------------------------------------------------------------------------------------

    async def _on_forward(self, sender: Contact, message: Forward, stream: AsyncIterator[Buffer]) -> Response:
        reader, results = FrameReader(stream), []
        for entry in message.shards:
            item: BufferedDelta | ForwardStatus = "unknown"
            if entry.shard < len(self.store):
                item = await self._item(reader, sender, message, entry)
            if isinstance(item, BufferedDelta):
                results.append(self._accept(entry, item, sender))
            else:
                results.append(ForwardResult(entry.shard, item))
        return Response(encode(ForwardAnswer(results)))

    async def _item(
        self, reader: FrameReader, sender: Contact, message: Forward, entry: Forwarded
    ) -> BufferedDelta | ForwardStatus:
        """One shard of a forward; `lacks` for a delta of this node that it keeps no more, `unknown` for no delta."""
        shard, size, turns = entry.shard, self.store.size(entry.shard), self.rpc.turns
        identity = DeltaId(message.node, message.incarnation, entry.number or message.step)
        if self.store.holds_values:
            batch = await read_item(reader, shard, 0)
            self.counters.bytes_received += len(batch.encoded)
            await turns.take(batch.work)
            return batch.buffered(identity, 1.0)
        delta, encoded, codec = _NO_VALUES, _NOTHING, _FLOAT32
        if not entry.has_it:
            encoded, codec = await read_encoded(reader, shard, Part.DELTA, size)
            self.counters.bytes_received += len(encoded)
            delta, is_in_range = await turns.run(self._executor, size, _decoded_in_range, encoded, codec, size)
            # Promise 7: values that are not finite or absurd change nothing.
            if not is_in_range:
                self._log.warning("forward_out_of_range", source=sender.node_id.hex()[:8], shard=shard)
                self.view.score.nonsense(sender.node_id, "forward")
                return "unknown"
        elif (sent := self.sent.find(identity, shard)) is not None:
            encoded, codec = sent.encoded, sent.codec
            delta = await turns.run(self._executor, size, codecs.decoded, encoded, codec, size)
        elif not self._has(identity, shard, sender):
            return "lacks"
        # Promise 7: an absurd step changes nothing.
        if message.step > self.view.plausible_steps().furthest:
            return "unknown"
        return BufferedDelta(
            identity,
            message.weight * entry.scale,
            delta,
            encoded,
            codec,
            message.momentum,
            entry.norm if message.momentum else 0.0,
        )

    def _has(self, identity: DeltaId, shard: int, owner: Contact) -> bool:
        """Whether the delta is in the copy: its forward came late, and its values are not looked at."""
        backed = self.store.backed.get(shard)
        is_active = backed is not None and backed.is_active and backed.owner.node_id == owner.node_id
        return is_active and backed is not None and backed.state is not None and backed.state.knows(identity)

    def _accept(self, entry: Forwarded, item: BufferedDelta, sender: Contact) -> ForwardResult:
        folded = entry.folded_step and min(entry.folded_step, self.view.plausible_steps().furthest)
        status, known = self.store.accept_forward(entry.shard, entry.term, item, folded, sender.node_id)
        backed = self.store.backed.get(entry.shard)
        # Promise 7: broken memory.
        if backed is not None and backed.state is not None and not is_good(backed.state, self._clock.monotonic()):
            self.store.drop_copy(entry.shard)  # the owner hears of it now, and sends its state again
            self._log.error("copy_broken", shard=entry.shard)
            status = "unknown"
        return ForwardResult(entry.shard, status, known)

    # -- catch-up -----------------------------------------------------------------------------------------------

    async def _on_learn(self, sender: Contact, message: Learn, _stream: AsyncIterator[Buffer]) -> Response:
        taken = []
        if not self.run.is_leaving and not self.view.score.is_quarantined(sender.node_id):
            asked = zip(message.shards, message.attempts, strict=False)
            begin = self.store.begin_catch_up
            taken = [info.shard for info, attempt in asked if begin(info.shard, info.term, sender, attempt)]
        answer = self._answer((info.shard for info in message.shards), taken)
        publications = [await self._base(shard, sender) for shard in taken]
        return Response(encode(TransferResult(taken, answer.others, publications if any(publications) else [])))

    async def _base(self, shard: int, owner: Contact) -> bytes:
        """The publication of which this node holds the first published value, which is kept until the state has
        come."""
        publication, published = self.replica.position_of(shard)
        if not publication or published:
            return b""
        await self.rpc.turns.take(self.store.size(shard))
        if self.replica.position_of(shard) != (publication, 0):
            return b""
        is_noted = self.store.note_base(shard, owner.node_id, publication, self.replica.slice_of(shard))
        return publication if is_noted else b""

    async def _on_state(self, sender: Contact, message: ShardList, stream: AsyncIterator[Buffer]) -> Response:
        reader = FrameReader(stream)
        taken = []
        for shard in message.shards:
            most = self.view.plausible_steps()
            try:
                term, state = await shard_states.read_state(reader, shard, self.store, most, self._executor)
            except Nonsense:
                self.view.score.nonsense(sender.node_id, "state")
                raise
            if self.store.take_state(shard, term, sender, state):
                taken.append(shard)
        return Response(encode(TransferResult(taken, [])))

    # -- hand-over ----------------------------------------------------------------------------------------------

    async def _on_hand_over(self, sender: Contact, message: HandOver, stream: AsyncIterator[Buffer]) -> Response:
        published = await self.publisher.read_heads(message, sender.node_id, FrameReader(stream))
        taken = []
        for info, known in zip(message.shards, message.known, strict=False):
            was_owned = info.shard in self.store.owned
            if self._become_owner(info, sender, known):
                taken.append(info.shard)
                if not was_owned and info.shard in published:
                    self.publisher.go_on(info.shard, self.store.owned[info.shard], published[info.shard])
        if taken:
            publications = sum(shard in published for shard in taken)
            self._log.info(
                "shards_received", count=len(taken), publications=publications, source=sender.node_id.hex()[:8]
            )
            self.rebalance.wake()
        return Response(encode(self._answer((info.shard for info in message.shards), taken)))

    def _become_owner(self, info: OwnerInfo, sender: Contact, known: int) -> bool:
        mine = self.store.owned.get(info.shard)
        if mine is not None and mine.term == info.term:
            return True  # a retry: the answer to the first hand-over was lost
        backed = self.store.backed.get(info.shard)
        if backed is None or backed.state is None or backed.owner.node_id != sender.node_id:
            return False
        # A hand-over right after the promotion may arrive before any delta has made this learner the backup.
        promoted = backed.promised is not None and info.term.number == backed.promised.number + 1
        # Promise 1: a copy without the newest deltas, or under a term that others refuse, does not go on.
        is_successor = (backed.is_active or promoted) and self.store.ownership.admits(info.shard, info.term)
        if self.run.is_leaving or not is_successor:
            return False
        now, backup, me = self._clock.monotonic(), sender if self.has_backups else None, self.rpc.me
        owned = self.store.own(info.shard, backed.state, info.term, me, now, by_handover=True, backup=backup)
        is_reached = self.swarm.takes_streams(sender.node_id)
        # Promise 1: the former owner may lack a delta that this copy has, and needs a new catch-up. Promise 3: or no
        # delta reaches it.
        if backup is not None and (known != owned.state.known_count or not is_reached):
            self.store.drop_backup(info.shard, me)
        self.store.fold(info.shard, self.run.passed_step)
        return True

    # -- silent owners ------------------------------------------------------------------------------------------

    def due(self) -> dict[bytes, tuple[Contact, list[int]]]:
        """The shards to ask about, by owner, except owners that are gone: those that have not changed since the call
        before, `CONFIRM_AFTER_S` ago."""
        now = self._clock.monotonic()
        silent: dict[bytes, tuple[Contact, list[int]]] = {}
        if now - self._looked_s < CONFIRM_AFTER_S:
            return silent
        former, self._looked_s = self._marks, now
        self._marks = {shard: _mark(backed) for shard, backed in self.store.backed.items()}
        for shard, backed in self.store.backed.items():
            is_gone = backed.owner_restarted or self.view.is_gone(backed.owner.node_id)
            if former.get(shard) == self._marks[shard] and not is_gone:
                silent.setdefault(backed.owner.node_id, (backed.owner, []))[1].append(shard)
        return silent

    async def ask(self, silent: dict[bytes, tuple[Contact, list[int]]]) -> None:
        """Ask each owner about its shards. One that does not answer is left to the failure detector."""
        for owner, shards in silent.values():
            attempts = {shard: backed.attempt for shard in shards if (backed := self.store.backed.get(shard))}
            question = ShardList(shards)
            try:
                answer = await self.rpc.ask(owner, "backing", question, TransferResult, PARTNER_TIMEOUT_S)
            except TransportError as error:
                self._log.debug("backing_not_confirmed", owner=owner.node_id.hex()[:8], reason=str(error))
                continue
            for info in answer.others:
                self.store.drop_unconfirmed(info, owner, attempts.get(info.shard, 0))

    async def _on_backing(self, sender: Contact, message: ShardList, _stream: AsyncIterator[Buffer]) -> Response:
        taken = [shard for shard in message.shards if self._needs(shard, sender)]
        return Response(encode(self._answer(message.shards, taken)))

    def _needs(self, shard: int, sender: Contact) -> bool:
        """Whether the owner relies on this copy. Promise 1: without a backup, any copy is better than none."""
        owned = self.store.owned.get(shard)
        return owned is not None and (sender.node_id in owned.target_ids() or lacks_backup(self.view, owned))


def _mark(backed: Backed) -> Mark:
    count = len(backed.buffered) if backed.state is None else backed.state.known_count
    return backed.owner.node_id, backed.term, count


_NO_VALUES: Vector = np.zeros(0, np.float32)
_NOTHING: Encoded = b""
_FLOAT32: CodecName = "float32"


def _decoded_in_range(encoded: Encoded, codec: CodecName, size: int) -> tuple[Vector, bool]:
    delta = codecs.decoded(encoded, codec, size)
    return delta, is_delta_in_range(delta)
