"""The owner's and backup's side of a delta: pushes and forwards.

An owner adds a delta only after its backup has it, and looks again before it adds: whatever changed in between (owner,
term, backup, the delta itself) is seen then. What it cannot acknowledge it answers with `redirect`, `retry` or a final
`refused`; the origin keeps the identity and tries again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator

from overlay.peers import Contact
from overlay.transport import Buffer, Response, TransportError
from training.encoding import codecs
from training.encoding.codecs import Vector
from training.encoding.frames import BadFrame, FrameReader, Part, encoded_frames, framed_bytes, read_array, sized
from training.exchange.context import ExchangeContext
from training.exchange.cooperative import LoopYielder
from training.exchange.messages import (
    Forward,
    ForwardAnswer,
    Forwarded,
    ForwardResult,
    Push,
    PushAnswer,
    PushResult,
    encode,
)
from training.exchange.owner.delta_item import IncomingDelta
from training.exchange.owner.validation import DeltaValidator
from training.exchange.store.records import BufferedDelta, Owned
from training.exchange.terms import Fence, Term
from training.shards.applied import DeltaId

#: How often a delta is forwarded again because the pair changed under it, before its origin is told to retry.
FORWARD_ROUNDS = 3


#: What makes a backup's "ok" count: shard, node, the term it was sent under, and the last promise then. A node that was
#: taught anew since has a snapshot that may lack what it took before.
Receipt = tuple[int, bytes, Term, int]


def _receipt(shard: int, to: Contact, owned: Owned) -> Receipt:
    return shard, to.node_id, owned.term, owned.promised


def _forwarded(item: IncomingDelta, owned: Owned, to: Contact) -> Forwarded:
    closings = owned.untold(to.node_id)
    return Forwarded(item.shard, *owned.term, owned.state.folded_step, item.scale, item.norm, closings)


class DeltaHandler:
    """Takes deltas into the shards this node holds."""

    def __init__(self, context: ExchangeContext) -> None:
        self._context = context
        self._swarm = context.swarm
        self._store = context.store
        self._run = context.run
        self._view = context.view
        self._rpc = context.rpc
        self._rebalance = context.rebalance
        self._counters = context.counters
        self._log = context.environment.log
        self._in_flight: dict[tuple[int, DeltaId], asyncio.Future[None]] = {}
        #: Origins whose deltas were added since the last look: "whose deltas did this step merge?"
        self.merged: dict[bytes, int] = {}
        self._judging = DeltaValidator(context)

    def register(self) -> None:
        """Put the handlers behind the overlay's door."""
        self._rpc.register("push", Push, self._on_push)
        self._rpc.register("forward", Forward, self._on_forward)

    # -- push ---------------------------------------------------------------------------------------------------

    async def _on_push(self, sender: Contact, push: Push, stream: AsyncIterator[Buffer]) -> Response:
        if push.node != sender.node_id:
            return Response(encode(PushAnswer([self._judging.refuse(shard, "not_yours") for shard in push.shards])))
        reader = FrameReader(stream)
        items = []
        results: dict[int, PushResult] = {}
        self._rebalance.challenge(push.fences)
        if any(shard >= len(self._store) for shard in push.shards):
            return Response(encode(PushAnswer([self._judging.refuse(index, "shape") for index in push.shards])))
        for shard in push.shards:
            try:
                delta, encoded, codec = await read_array(reader, shard, Part.DELTA, self._store.size(shard))
            except BadFrame as error:
                self._log.warning("delta_malformed", source=sender.node_id.hex()[:8], reason=str(error))
                rest = [index for index in push.shards if index not in results]
                results |= {index: self._judging.refuse(index, "malformed") for index in rest}
                return Response(encode(PushAnswer([results[index] for index in push.shards])))
            self._counters.bytes_received += len(encoded)
            item = IncomingDelta(shard, delta, encoded, codec)
            owned = self._store.owned.get(shard)
            if owned is not None and owned.has_targets:
                items.append(item)  # they go to the backup together
            else:
                # At once, while it is in the processor's cache and the next one is on its way.
                results[shard] = (await self.accept(push, [item]))[0]
        if items:
            results |= {result.shard: result for result in await self.accept(push, items)}
        return Response(encode(PushAnswer([results[shard] for shard in push.shards])))

    async def accept(self, push: Push, items: list[IncomingDelta]) -> list[PushResult]:
        """Take the shards of one delta: replicate, look again, add. Also called for the node's own shards."""
        identity = DeltaId(push.node, push.incarnation, push.step)
        results: dict[int, PushResult] = {}
        fresh: list[IncomingDelta] = []
        for item in items:
            # A retry of an identity that is on its way joins it instead of racing it.
            while (flight := self._in_flight.get((item.shard, identity))) is not None:
                # Shielded: a waiter that is cancelled or times out must not cancel the one it waits for.
                await asyncio.shield(flight)
            verdict = self._classify(push, identity, item.shard, repair=item.repair)
            verdict = verdict or self._judging.judge(push, identity, item)
            if verdict is not None:
                results[item.shard] = verdict
            else:
                fresh.append(item)
        landing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for item in fresh:
            self._in_flight[item.shard, identity] = landing
        try:
            await self._replicate_and_add(push, identity, fresh, results)
        finally:
            for item in fresh:
                self._in_flight.pop((item.shard, identity), None)
            landing.set_result(None)
        return [results[item.shard] for item in items]

    async def drained(self, shards: list[int], timeout_s: float) -> bool:
        """Wait until no delta of these shards is in flight; False when that takes too long."""
        wanted = dict.fromkeys(shards)
        try:
            async with asyncio.timeout(timeout_s):
                while flights := [flight for (shard, _), flight in self._in_flight.items() if shard in wanted]:
                    await asyncio.shield(flights[0])
        except TimeoutError:
            return False
        return True

    def alone(self, shards: Iterable[int]) -> list[int]:
        """Those of the shards that this node owns and nobody else has to have first."""
        if self._context.settings.replicas and self._view.has_eligible_others():
            return []  # a shard without a backup is about to get one
        if self._store.rule.robust:
            return []  # own deltas are judged, or collected, like everybody's
        found = ((shard, self._store.owned.get(shard)) for shard in shards)
        return [shard for shard, owned in found if owned is not None and not owned.has_targets]

    def add_alone(self, push: Push, parts: Iterable[tuple[int, Vector]], *, is_finite: bool) -> dict[int, PushResult]:
        """Add at once shards of this node's own delta that it has `alone`; those that must wait are left out of the
        answer.

        A part may be the trainer's memory: it is not kept. What is the same for all shards is looked at once, which is
        sound because nothing is awaited here. `is_finite`: every value was found finite already.
        """
        results: dict[int, PushResult] = {}
        identity = DeltaId(push.node, push.incarnation, push.step)
        weight = self._judging.clamped(push.weight)
        is_held, is_logged = self._context.synchronous, self._view.has_met_others()
        # What is added is exact. What a split's other side would get of it is as exact as what it gets by pushes.
        log_codec: codecs.CodecName = "float32" if self._context.settings.codec == "float32" else "bfloat16"
        limit = self._context.stale_limit
        is_late = limit is not None and self._view.median_step() - push.base_step > limit
        for shard, part in parts:
            owned = self._store.owned[shard]
            if self._in_flight and (shard, identity) in self._in_flight:
                continue
            if is_late or not is_finite or owned.moving or push.base_step < owned.state.era_step:
                verdict = self._classify(push, identity, shard)
                if verdict is None and not is_finite and not codecs.all_finite(part):
                    verdict = self._judging.refuse(shard, "not_finite")
                if verdict is not None:
                    if verdict.status != "retry":
                        results[shard] = verdict
                    continue
            if is_held or is_logged:
                kept = part.copy() if is_held else part
                own = BufferedDelta(identity, weight, kept, is_held, codec=log_codec, is_logged=is_logged)
                version = self._store.add(shard, own)
            else:
                version = self._store.add_only(shard, identity, weight, part)
            results[shard] = PushResult(shard, "ok", version)
            self.merged[identity.node] = identity.step
        return results

    def _classify(self, push: Push, identity: DeltaId, shard: int, *, repair: bool = False) -> PushResult | None:
        """What can be said of a delta without a look at its values."""
        owned = self._store.owned.get(shard)
        if owned is None:
            return self._elsewhere(shard)
        if owned.state.knows(identity):
            # After a hand-over the new owner may be the only one that has it: then it is not safe yet.
            if self.unsafe(owned):
                return PushResult(shard, "retry", reason="no_backup_yet")
            return PushResult(shard, "ok", owned.state.version)
        if owned.moving or self._run.is_closed:
            return PushResult(shard, "retry", reason="moving" if owned.moving else "leaving")
        if repair:
            return None
        limit = self._context.stale_limit
        if limit is not None and self._view.median_step() - push.base_step > limit:
            return self._judging.refuse(shard, "late")
        if push.base_step < owned.state.era_step:
            return self._judging.refuse(shard, "before_era")
        return None

    def close_windows(self) -> None:
        """Close the windows that have become complete because others ended or died."""
        if self._store.rule.robust == "trimmed-mean" and not self._context.synchronous:
            for shard in self._store.owned:
                self._store.close_complete(shard, self._view.worker_count())

    def unsafe(self, owned: Owned) -> bool:
        """No backup, although another node could be one."""
        return not owned.targets() and bool(self._context.settings.replicas) and self._view.has_eligible_others()

    def _elsewhere(self, shard: int) -> PushResult:
        where = self._store.elsewhere(shard)
        if where is None:
            return PushResult(shard, "retry", reason="owner_unknown")
        return PushResult(shard, "redirect", where=where)

    async def _replicate_and_add(
        self, push: Push, identity: DeltaId, fresh: list[IncomingDelta], results: dict[int, PushResult]
    ) -> None:
        repair = any(item.repair for item in fresh)
        weight = self._judging.clamped(push.weight, repair=repair)
        acknowledged: dict[Receipt, None] = {}
        turn = LoopYielder()
        remaining = fresh
        for _ in range(FORWARD_ROUNDS):
            groups: dict[Contact, list[tuple[IncomingDelta, Owned]]] = {}
            waiting: list[IncomingDelta] = []
            for item in remaining:
                owned = self._store.owned.get(item.shard)
                if owned is None:
                    results[item.shard] = self._elsewhere(item.shard)
                    continue
                missing = [to for to in owned.targets() if _receipt(item.shard, to, owned) not in acknowledged]
                if missing:
                    waiting.append(item)
                    for to in missing:
                        groups.setdefault(to, []).append((item, owned))
                elif self._run.is_drained:
                    results[item.shard] = PushResult(item.shard, "retry", reason="leaving")
                elif self.unsafe(owned):
                    self._rebalance.wake()
                    results[item.shard] = PushResult(item.shard, "retry", reason="no_backup_yet")
                else:
                    version = self._store.add(item.shard, self._waiting(identity, weight, item))
                    self.merged[identity.node] = identity.step
                    self._judging.note_added(identity, item)
                    if self._store.rule.robust == "trimmed-mean" and not self._context.synchronous:
                        self._store.close_complete(item.shard, self._view.worker_count())
                    results[item.shard] = PushResult(item.shard, "ok", version)
                    await turn.after(item.delta.size)
            if not groups:
                return
            jobs = [self._forward(to, push, weight, pairs) for to, pairs in groups.items()]
            for oks in await asyncio.gather(*jobs):
                acknowledged.update(oks)
            remaining = waiting
        for item in remaining:
            results.setdefault(item.shard, PushResult(item.shard, "retry", reason="backup_silent"))

    def _waiting(self, identity: DeltaId, weight: float, item: IncomingDelta) -> BufferedDelta:
        return BufferedDelta(
            identity,
            weight * item.scale,
            item.delta,
            self._context.synchronous,
            item.encoded,
            item.codec,
            momentum=not item.repair,
            norm=0.0 if item.repair else item.norm,
        )

    async def _forward(
        self, to: Contact, push: Push, weight: float, pairs: list[tuple[IncomingDelta, Owned]]
    ) -> dict[Receipt, None]:
        """Send deltas to a backup or learner; returns what it acknowledged and draws the consequences of the rest."""
        message = Forward(
            genesis=self._context.genesis,
            node=push.node,
            incarnation=push.incarnation,
            step=push.step,
            weight=weight,
            synchronous=self._context.synchronous,
            shards=[_forwarded(item, owned, to) for item, owned in pairs],
            momentum=not pairs[0][0].repair,
        )

        receipts = {item.shard: _receipt(item.shard, to, owned) for item, owned in pairs}
        closed = {item.shard: owned.closed for item, owned in pairs}

        def stream() -> Iterator[Buffer]:
            for item, _ in pairs:
                yield from encoded_frames(item.shard, item.encoded, item.codec, Part.DELTA, step=push.step)

        size = sum(len(item.encoded) for item, _ in pairs)
        self._counters.bytes_sent += size
        try:
            framed = sum(framed_bytes(item.codec, item.delta.size) for item, _ in pairs)
            body = sized(stream(), framed)
            async with self._rpc.request("forward", to, message, body) as answer:
                results = self._rpc.decoded(to, answer.head, ForwardAnswer).results
        except TransportError as error:
            self._forward_failed(to, pairs, str(error))
            return {}
        acknowledged: dict[Receipt, None] = {}
        by_shard = {item.shard: owned for item, owned in pairs}
        for result in results:
            owned = by_shard.get(result.shard)
            if owned is None:
                continue
            if result.status == "ok":
                acknowledged[receipts[result.shard]] = None
                owned.has_told(to.node_id, closed[result.shard])
            elif result.status == "fenced":
                self._fenced(result, owned)
            else:
                self._drop_target(to, result.shard, owned)
        return acknowledged

    def _fenced(self, result: ForwardResult, owned: Owned) -> None:
        term = Term(result.term_number, result.term_node)
        if term.node == self._swarm.node_id and term.number <= owned.promised:
            return  # our own newer term, on its way: the next round carries it
        if self._store.owned.get(result.shard) is owned:
            # Whose term is it? Perhaps nobody's: only a fence that the backup remembers from before it restarted.
            self._rebalance.challenge([Fence(result.shard, *term)])

    def _forward_failed(self, to: Contact, pairs: list[tuple[IncomingDelta, Owned]], reason: str) -> None:
        self._swarm.suspect(to.node_id, reason)
        for _, owned in pairs:
            if owned.learner is not None and owned.learner.node_id == to.node_id:
                owned.learner = None  # it missed a delta; a later attempt begins with a new snapshot
        self._rebalance.wake()

    def _drop_target(self, to: Contact, shard: int, owned: Owned) -> None:
        """It says that it does not back this shard."""
        if owned.learner is not None and owned.learner.node_id == to.node_id:
            owned.learner = None
        is_backup = owned.backup is not None and owned.backup.node_id == to.node_id
        if is_backup and self._store.owned.get(shard) is owned:
            self._store.drop_backup(shard, self._context.me())
        self._rebalance.wake()

    async def _on_forward(self, sender: Contact, message: Forward, stream: AsyncIterator[Buffer]) -> Response:
        reader = FrameReader(stream)
        identity = DeltaId(message.node, message.incarnation, message.step)
        results = []
        for entry in message.shards:
            if entry.shard >= len(self._store):
                results.append(ForwardResult(entry.shard, "unknown"))
                continue
            delta, encoded, codec = await read_array(reader, entry.shard, Part.DELTA, self._store.size(entry.shard))
            self._counters.bytes_received += len(encoded)
            item = BufferedDelta(
                identity,
                message.weight * entry.scale,
                delta,
                message.synchronous,
                encoded,
                codec,
                message.momentum,
                entry.norm if message.momentum else 0.0,
            )
            term = Term(entry.term_number, entry.term_node)
            status, known = self._store.accept_forward(
                entry.shard, term, item, entry.folded_step, sender.node_id, entry.closings
            )
            results.append(ForwardResult(entry.shard, status, *known))  # type: ignore[arg-type]
        return Response(encode(ForwardAnswer(results)))
