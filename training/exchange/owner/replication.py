"""Replicates a delta before its owner adds it: forward to backup and learner, check again, add; and what these answer.

Between the forward and its answer the owner, its term, its backup or the delta itself may change. So the owner checks
again after every answer, and adds only if each of its present targets has acknowledged the delta under the present
term. A delta that cannot be added is answered with `redirect` or `retry`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Container
from dataclasses import dataclass
from itertools import chain

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import Buffer, Response, TransportError
from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.codecs import Encoded, Vector
from p2pnode.training.encoding.frames import FrameReader, Part, read_encoded, sized
from p2pnode.training.encoding.table import CodecName
from p2pnode.training.exchange.delta import NO_VALUES, IncomingDelta, SentDeltas, read_item
from p2pnode.training.exchange.messages import (
    Forward,
    ForwardAnswer,
    Forwarded,
    ForwardResult,
    ForwardStatus,
    Push,
    PushResult,
    encode,
)
from p2pnode.training.exchange.owner.validation import DeltaValidator, is_good
from p2pnode.training.exchange.rpc import ExchangeRpc
from p2pnode.training.exchange.run_state import Counters, RebalanceRequests, RunState, SwarmView
from p2pnode.training.exchange.store.records import BufferedDelta, Owned
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.terms import Fence, Term
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.delta_range import is_delta_in_range
from p2pnode.training.shards.outer_rule import is_plain
from p2pnode.training.swarm import Swarm

#: How often a delta is forwarded again because the pair changed meanwhile, before the origin gets "retry".
FORWARD_ROUNDS = 3
#: Deltas that were forwarded and not added whose weights are remembered.
MAX_FORWARDED = 1024

#: The validity of an acknowledgement: shard, target node, the term it was sent under, and the last promise then. A
#: learner that began a new catch-up since then has another snapshot, which may lack what it acknowledged before.
Receipt = tuple[int, bytes, Term, int]

#: A delta and the shard it is for.
Pair = tuple[IncomingDelta, Owned]


def not_owned(store: ShardStore, shard: int) -> PushResult:
    """The answer for a shard that this node does not own. It never names itself: it may have lost the shard and taken
    it again since the delta came."""
    if shard in store.owned:
        return PushResult.retry(shard, "moving")
    info = store.redirect(shard)
    return PushResult.retry(shard, "owner_unknown") if info is None else PushResult(shard, "redirect", owner_info=info)


def lacks_backup(view: SwarmView, owned: Owned) -> bool:
    """Whether a shard has no backup although another node could be one."""
    return not owned.has_targets and view.expects_backups()


@dataclass(eq=False)
class DeltaReplicator:
    """Forwards deltas to the backups of this node's shards, and adds them."""

    swarm: Swarm
    store: ShardStore
    view: SwarmView
    run: RunState
    rpc: ExchangeRpc
    rebalance: RebalanceRequests
    validator: DeltaValidator
    environment: Environment

    def __post_init__(self) -> None:
        #: Origins of the deltas added since `take_merged`, and the latest step of each.
        self._merged: dict[bytes, int] = {}
        #: Deltas that a target may have and that are not added here: the weight, and per shard the factor of clipping
        #: and whether with momentum.
        self._forwarded: dict[DeltaId, tuple[float, dict[int, tuple[float, bool]]]] = {}

    def note_merged(self, identity: DeltaId) -> None:
        """A delta was added to a shard of this node."""
        self._merged[identity.node] = identity.step
        self.run.counters.merged += 1

    def take_merged(self) -> dict[bytes, int]:
        """Whose deltas were added since the last call: node -> its latest step."""
        merged, self._merged = self._merged, {}
        return merged

    async def replicate_and_add(self, push: Push, identity: DeltaId, items: list[IncomingDelta]) -> list[PushResult]:
        """Replicate the shards of one delta and add them; one result for each.

        Each round looks at the shards anew: it adds what all present targets have acknowledged, and forwards the others
        to the targets that lack them. So the first round forwards what has a backup, and the second adds it, unless the
        targets have changed meanwhile."""
        # A batch of named values is not weighed: its owner has computed what comes of it.
        weight = push.weight if self.store.holds_values else self._weight(push, identity, items)
        acknowledged: set[Receipt] = set()
        #: Shards whose origin backs them up and keeps no copy of the delta any more.
        lacking: set[int] = set()
        results: list[PushResult] = []
        remaining = items
        for _ in range(FORWARD_ROUNDS):
            groups: dict[tuple[Contact, bool], list[Pair]] = {}
            forwarded: list[IncomingDelta] = []
            for item in remaining:
                if not self._missing(item, acknowledged):
                    await self.rpc.turns.take(item.work)  # before what is checked: all of it may change meanwhile
                owned = self.store.owned.get(item.shard)
                if owned is None or (item.basis is not None and owned is not item.basis):
                    results.append(not_owned(self.store, item.shard))
                    continue
                if missing := self._missing(item, acknowledged):
                    forwarded.append(item)
                    if item.batch is None:
                        self._note_forwarded(identity, weight, item)
                    for to in missing:
                        groups.setdefault((to, item.momentum), []).append((item, owned))
                    continue
                result = self._add(item.identity(identity), weight, item, owned)
                results.append(result)
                if result.status == "ok" and item.batch is None:
                    self._forget_forwarded(identity, item.shard)
            if not groups:
                return results
            jobs = [self._forward(to, push, weight, pairs, lacking) for (to, _), pairs in groups.items()]
            # A task of its own for the only one would cost as much as the request.
            found = [await jobs[0]] if len(jobs) == 1 else await asyncio.gather(*jobs)
            acknowledged.update(*found)
            remaining = forwarded
        return results + [PushResult.retry(item.shard, "backup_silent") for item in remaining]

    def _weight(self, push: Push, identity: DeltaId, items: list[IncomingDelta]) -> float:
        """The weight to add a delta with; sets the factors of its shards, and whether they have momentum.

        They are those of an earlier attempt, if a target may have it with these: the number of workers, or the median
        length, may have changed since, or the delta comes again as a repair.
        """
        repair = any(item.repair for item in items)
        plain = all(is_plain(item.codec) for item in items)
        weight = self.validator.clamp_weight(push.weight, push.workers, repair=repair, plain=plain)
        former_weight, told = self._forwarded.get(identity, (weight, {}))
        for item in items:
            item.scale, item.momentum = told.get(item.shard, (item.scale, not item.repair))
        return former_weight

    def _missing(self, item: IncomingDelta, acknowledged: Container[Receipt]) -> list[Contact]:
        """The targets of its shard that have not acknowledged a delta."""
        owned = self.store.owned.get(item.shard)
        if owned is None:
            return []
        return [to for to in owned.targets() if _receipt(item.shard, to, owned) not in acknowledged]

    def _note_forwarded(self, identity: DeltaId, weight: float, item: IncomingDelta) -> None:
        self._forwarded.setdefault(identity, (weight, {}))[1][item.shard] = item.scale, item.momentum
        while len(self._forwarded) > MAX_FORWARDED:
            del self._forwarded[next(iter(self._forwarded))]

    def _forget_forwarded(self, identity: DeltaId, shard: int) -> None:
        """It is added: further attempts are answered by its identity."""
        told = self._forwarded.get(identity, (0.0, {}))[1]
        if told.pop(shard, None) is not None and not told:
            del self._forwarded[identity]

    def _add(self, identity: DeltaId, weight: float, item: IncomingDelta, owned: Owned) -> PushResult:
        """Add a delta that every target has, unless this node is leaving or the shard has lost its backup."""
        if self.run.is_drained:
            return PushResult.retry(item.shard, "leaving")
        if lacks_backup(self.view, owned):
            self.rebalance.wake_for_delta()
            return PushResult.retry(item.shard, "no_backup_yet")
        self.store.add(item.shard, item.buffered(identity, weight))
        self.note_merged(identity)
        owned.state.note_addition(self.environment.clock.monotonic())
        if item.batch is None:
            self.validator.note_added(identity, item)
        return PushResult(item.shard, "ok", version=0 if self.store.synchronous else owned.state.version)

    async def _forward(
        self, to: Contact, push: Push, weight: float, pairs: list[Pair], lacking: set[int]
    ) -> set[Receipt]:
        """Send deltas to a backup or learner, and return what it acknowledged; a target that lacks one is dropped.

        To the node that the delta came from only its identity goes, unless it answered that it keeps it no more.
        """
        # The origin of a repair has had its answer, and keeps it no more. Of named values no node keeps a batch.
        is_repair = any(item.repair for item, _ in pairs)
        is_origin = to.node_id == push.node and not is_repair and not self.store.holds_values
        with_body = {item.shard: item for item, _ in pairs if not is_origin or item.shard in lacking}
        # As sent: term and promise may change before the answer arrives.
        sent = {item.shard: (owned, _receipt(item.shard, to, owned)) for item, owned in pairs}
        message = Forward(
            node=push.node,
            incarnation=push.incarnation,
            step=push.step,
            weight=weight,
            shards=[
                Forwarded(
                    item.shard,
                    owned.term,
                    owned.state.folded_step,
                    item.scale,
                    item.norm or 0.0,
                    item.shard not in with_body,
                    item.number,
                )
                for item, owned in pairs
            ],
            momentum=pairs[0][0].momentum,
        )
        self.run.counters.bytes_sent += sum(len(item.encoded) for item in with_body.values())
        frames = chain.from_iterable(item.frames(push.step) for item in with_body.values())
        body = sized(frames, sum(item.framed_bytes for item in with_body.values()))
        try:
            async with self.rpc.request("forward", to, message, body) as answer:
                results = self.rpc.decoded(to, answer.head, ForwardAnswer).results
        except TransportError as error:
            self.swarm.suspect(to.node_id, str(error))
            for _, owned in pairs:
                # Promise 10 (docs/faults.md): without a backup the delta waits for the learner in any case; its copy is
                # not begun anew.
                if owned.backup is not None:
                    owned.remove_learner(to.node_id)
            self.rebalance.wake()
            return set()
        acknowledged: set[Receipt] = set()
        for result in results:
            if result.shard not in sent:
                continue
            owned, receipt = sent[result.shard]
            if result.status == "ok":
                acknowledged.add(receipt)
            elif result.status == "fenced":
                self._on_fenced(result, owned)
            elif result.status == "lacks" and result.shard not in with_body:
                lacking.add(result.shard)
            else:
                self._drop_target(to, result.shard, owned)
        return acknowledged

    def _on_fenced(self, result: ForwardResult, owned: Owned) -> None:
        term = result.term
        if term.node == self.store.node_id and term.number <= owned.promised:
            return  # this node's own newer term; the next round carries it
        if self.store.owned.get(result.shard) is owned:
            # The term may have no owner: a backup keeps its fence over a restart.
            self.rebalance.challenge([Fence(result.shard, term)])

    def _drop_target(self, to: Contact, shard: int, owned: Owned) -> None:
        """The target answered that it does not back up this shard."""
        owned.remove_learner(to.node_id)
        is_backup = owned.backup is not None and owned.backup.node_id == to.node_id
        if is_backup and self.store.owned.get(shard) is owned:
            self.store.drop_backup(shard, self.rpc.me)
        self.rebalance.wake()


def _receipt(shard: int, to: Contact, owned: Owned) -> Receipt:
    return shard, to.node_id, owned.term, owned.promised


@dataclass(eq=False)
class ForwardHandler:
    """Takes the deltas that the owners of shards forward to this node, as their backup or learner."""

    store: ShardStore
    view: SwarmView
    rpc: ExchangeRpc
    sent: SentDeltas
    counters: Counters
    environment: Environment

    def register(self) -> None:
        """Register the request handler."""
        self.rpc.register("forward", Forward, self._on_forward)

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
        shard, size = entry.shard, self.store.size(entry.shard)
        turns, executor = self.rpc.turns, self.environment.executor
        identity = DeltaId(message.node, message.incarnation, entry.number or message.step)
        if self.store.holds_values:
            batch = await read_item(reader, shard, 0)
            self.counters.bytes_received += len(batch.encoded)
            await turns.take(batch.work)
            return batch.buffered(identity, 1.0)
        delta: Vector = NO_VALUES
        encoded: Encoded = b""
        codec: CodecName = "float32"
        if not entry.has_it:
            encoded, codec = await read_encoded(reader, shard, Part.DELTA, size)
            self.counters.bytes_received += len(encoded)
            delta, is_in_range = await turns.run(executor, size, _decoded_in_range, encoded, codec, size)
            # Promise 7: values that are not finite or absurd change nothing.
            if not is_in_range:
                self.environment.log.warning("forward_out_of_range", source=sender.node_id.hex()[:8], shard=shard)
                self.view.score.nonsense(sender.node_id, "forward")
                return "unknown"
        elif (sent := self.sent.find(identity, shard)) is not None:
            encoded, codec = sent.encoded, sent.codec
            delta = await turns.run(executor, size, codecs.decoded, encoded, codec, size)
        elif not self._has(identity, shard, sender):
            return "lacks"
        # Promise 7: an absurd step changes nothing.
        if message.step > self.view.plausible_steps().furthest:
            return "unknown"
        found = IncomingDelta(
            shard, delta, encoded, codec, norm=entry.norm, scale=entry.scale, momentum=message.momentum
        )
        return found.buffered(identity, message.weight)

    def _has(self, identity: DeltaId, shard: int, owner: Contact) -> bool:
        """Whether the delta is in the copy: its forward came late, and its values are not looked at."""
        backed = self.store.backed.get(shard)
        is_active = backed is not None and backed.is_active and backed.owner.node_id == owner.node_id
        return is_active and backed is not None and backed.state is not None and backed.state.knows(identity)

    def _accept(self, entry: Forwarded, item: BufferedDelta, sender: Contact) -> ForwardResult:
        folded = entry.folded_step and min(entry.folded_step, self.view.plausible_steps().furthest)
        status, known = self.store.accept_forward(entry.shard, entry.term, item, folded, sender.node_id)
        backed, now_s = self.store.backed.get(entry.shard), self.environment.clock.monotonic()
        # Promise 7: broken memory.
        if backed is not None and backed.state is not None and not is_good(backed.state, now_s):
            self.store.drop_copy(entry.shard)  # the owner hears of it now, and sends its state again
            self.environment.log.error("copy_broken", shard=entry.shard)
            status = "unknown"
        return ForwardResult(entry.shard, status, known)


def _decoded_in_range(encoded: Encoded, codec: CodecName, size: int) -> tuple[Vector, bool]:
    delta = codecs.arithmetic(codec).decoded(encoded, size)
    return delta, is_delta_in_range(delta)
