"""Accepts pushed deltas for the shards that this node owns.

A delta that was added before is acknowledged again. One that cannot be added is rejected permanently, redirected to the
owner, or answered with "retry". The others are validated, replicated and added (`training.exchange.owner.replication`).
The origin keeps the identity of a delta until it has a final answer.

The shards of a push are handled in parts, while the next ones still arrive (`PushIntake`). At most `PARTS_AT_ONCE`
parts are being added, beside the one that is being received; then nothing more is read, and the origin waits. So the
memory of a push is bounded, and the line to the origin and that to the backup are used at once. A part that fills
slowly is closed by the first shard after `PART_S`: behind a slow line the backup gets the first shards while the last
are far away.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import Buffer, Response
from p2pnode.training.cooperative import VALUES_PER_PART, light
from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.codec_choice import CodecChoice
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.encoding.frames import BadFrame, FrameReader, Part, read_encoded
from p2pnode.training.exchange.delta import IncomingDelta
from p2pnode.training.exchange.messages import KNOWN, SIGN_OF_LIFE, Push, PushAnswer, PushResult, encode, piece_of
from p2pnode.training.exchange.owner.replication import DeltaReplicator, lacks_backup, not_owned
from p2pnode.training.exchange.owner.validation import DeltaValidator
from p2pnode.training.exchange.rpc import ExchangeRpc
from p2pnode.training.exchange.run_state import RebalanceRequests, RunState, SwarmView
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.delta_range import is_delta_in_range
from p2pnode.training.shards.outer_rule import is_plain
from p2pnode.training.swarm import Swarm


class BatchRepair(Protocol):
    """What the exchange knows of named values (`training.values.owner`): they take batches of the other side of a
    split in place of deltas."""

    async def repair(self, identity: DeltaId, item: IncomingDelta) -> PushResult: ...


@dataclass(eq=False)
class DeltaHandler:
    """Adds deltas, of other nodes and its own, to the shards of one owner.

    `stale_limit`: a delta whose base is more steps behind the median is
    refused; None: none is.
    """

    swarm: Swarm
    settings: ExchangeSettings
    store: ShardStore
    view: SwarmView
    run: RunState
    rpc: ExchangeRpc
    rebalance: RebalanceRequests
    codec: CodecChoice
    environment: Environment
    stale_limit: int | None

    def __post_init__(self) -> None:
        self._validator = DeltaValidator(self.store, self.view, self.run.counters, self.settings, self.environment)
        self.replicator = DeltaReplicator(
            swarm=self.swarm,
            store=self.store,
            view=self.view,
            run=self.run,
            rpc=self.rpc,
            rebalance=self.rebalance,
            validator=self._validator,
            environment=self.environment,
        )
        self.in_flight: dict[tuple[int, DeltaId], asyncio.Future[None]] = {}
        #: In a run without a model.
        self.values: BatchRepair | None = None

    def register(self) -> None:
        """Register the request handler."""
        self.rpc.register("push", Push, self._on_push, waits=True)

    # -- push ---------------------------------------------------------------------------------------------------

    async def _on_push(self, sender: Contact, push: Push, stream: AsyncIterator[Buffer]) -> Response:
        # Promise 1 (docs/faults.md): under another's identity it would count as that one's delta.
        if push.node != sender.node_id:
            return Response(encode(PushAnswer([self._validator.refuse(shard, "not_yours") for shard in push.shards])))
        self.rebalance.challenge(push.fences)
        if self.store.holds_values or any(shard >= len(self.store) for shard in push.shards):
            return Response(encode(PushAnswer([self._validator.refuse(shard, "shape") for shard in push.shards])))
        self.view.compare_count(push.node, push.workers)
        workers = self.view.worker_count()
        intake = PushIntake(push, self._received(push, stream), self.accept, self._malformed, self._has_targets)
        results = await intake.results(KEEP_ALIVE_INTERVAL_S)
        if results is None:
            return Response(encode(PushAnswer([], workers)), intake)
        return Response(encode(PushAnswer(results, workers)))

    async def _received(self, push: Push, stream: AsyncIterator[Buffer]) -> AsyncIterator[IncomingDelta]:
        """The shards of a push as they come. Raises `BadFrame`."""
        reader = FrameReader(stream)
        for shard in push.shards:
            size = self.store.size(shard)
            encoded, codec = await read_encoded(reader, shard, Part.DELTA, size)
            self.run.counters.bytes_received += len(encoded)
            # Received as float32 it is only measured.
            work = light(size) if codec == "float32" else size
            received = IncomingDelta.received
            yield await self.rpc.turns.run(self.environment.executor, work, received, shard, encoded, codec, size)

    def _malformed(self, push: Push, shards: Iterable[int], error: BadFrame) -> list[PushResult]:
        self.environment.log.warning("delta_malformed", source=push.node.hex()[:8], reason=str(error))
        return [self._validator.refuse(shard, "malformed") for shard in shards]

    def _has_targets(self, shard: int) -> bool:
        owned = self.store.owned.get(shard)
        return owned is not None and owned.has_targets

    async def accept(self, push: Push, items: list[IncomingDelta]) -> list[PushResult]:
        """Validate, replicate and add the shards of one delta. Also called for the node's own shards."""
        identity = DeltaId(push.node, push.incarnation, push.step)
        if self.values is not None:
            return [await self.values.repair(identity, item) for item in items]
        if push.apart and not self.store.rule.robust:
            if self.settings.weight != "sum":
                weight = self.view.merged_weight(push.weight, push.workers)
                push = msgspec.structs.replace(push, weight=weight, workers=0.0)  # it is not corrected once more
            for item in items:
                item.repair = True
        results: dict[int, PushResult] = {}
        fresh: list[IncomingDelta] = []
        for item in items:
            # A retry waits for the first attempt instead of racing it.
            while (flight := self.in_flight.get((item.shard, identity))) is not None:
                # Shielded: a waiter that is cancelled or times out must not cancel the attempt.
                await asyncio.shield(flight)
            result = self._check_role(push, identity, item.shard, repair=item.repair)
            result = result or self._validator.validate(push, identity, item)
            if result is not None:
                results[item.shard] = result
            else:
                fresh.append(item)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Promise 1: the same delta waits for its first copy.
        for item in fresh:
            self.in_flight[item.shard, identity] = done
        try:
            added = await self.replicator.replicate_and_add(push, identity, fresh)
            results |= {result.shard: result for result in added}
        finally:
            for item in fresh:
                self.in_flight.pop((item.shard, identity), None)
            done.set_result(None)
        return [results[item.shard] for item in items]

    async def drained(self, shards: list[int], timeout_s: float) -> bool:
        """Wait until no delta of these shards is in flight; False when that takes too long."""
        wanted = dict.fromkeys(shards)
        try:
            async with asyncio.timeout(timeout_s):
                while flights := [flight for (shard, _), flight in self.in_flight.items() if shard in wanted]:
                    await asyncio.shield(flights[0])
        except TimeoutError:
            return False
        return True

    # -- own deltas while no other node is there ------------------------------------------------------------------

    @property
    def is_alone(self) -> bool:
        """Whether own deltas are added as they are: this node has never met another, which would need them encoded.
        Those that a rule clips are clipped like all others."""
        return not (self.view.has_met_others() or self.store.rule.robust)

    def add_alone(self, push: Push, shard: int, part: Vector) -> PushResult | None:
        """Add an own delta while this node is alone; None if it is not any more, or the delta has to wait.

        The part may be the trainer's memory: it is not kept.
        """
        identity = DeltaId(push.node, push.incarnation, push.step)
        if not self.is_alone:
            return None
        if (result := self._check_role(push, identity, shard)) is not None:
            return result if result.status in ("ok", "refused") else None
        if not is_delta_in_range(part):
            return self._validator.refuse(shard, "out_of_range" if codecs.all_finite(part) else "not_finite")
        weight = self._validator.clamp_weight(push.weight)
        self.store.add_alone(shard, identity, weight, part, plain=is_plain(self.codec.codec))
        self.store.owned[shard].state.note_addition(self.environment.clock.monotonic())
        self.replicator.note_merged(identity)
        return PushResult(shard, "ok")

    def _check_role(self, push: Push, identity: DeltaId, shard: int, *, repair: bool = False) -> PushResult | None:
        """The answer to a delta where its values do not matter: not owned here, in already, or too late."""
        owned = self.store.owned.get(shard)
        if owned is None:
            return not_owned(self.store, shard)
        # Promise 1: it is added once.
        if owned.state.knows(identity):
            # After a hand-over the new owner may be the only node that has it: then it is not safe yet.
            if lacks_backup(self.view, owned):
                return PushResult.retry(shard, "no_backup_yet")
            return PushResult(shard, "ok", KNOWN, version=owned.state.version)
        # Promise 4: a move waits for what is in flight, and for no more.
        if owned.moving or self.run.is_closed:
            return PushResult.retry(shard, "moving" if owned.moving else "leaving")
        # Promise 1: it may have been added before.
        if owned.state.applied.may_have_forgotten(identity):
            return self._validator.refuse(shard, "late")
        # Promise 7: an absurd step changes nothing.
        if push.step > self.view.furthest_step():
            return self._validator.refuse(shard, "ahead")
        if repair and not push.apart:
            return None  # its sender has asked for the identities and the era of this state
        # Promise 9: the barrier bounds how old the values are that a delta was trained on.
        limit = self.stale_limit
        if limit is not None and not repair and self.view.median_step() - push.base_step > limit:
            return self._validator.refuse(shard, "late")
        # Promise 1: the replica that the state began with may have it.
        if push.base_step < owned.state.era_step:
            return self._validator.refuse(shard, "before_era")
        return None


PARTS_AT_ONCE = 2
PART_S = 0.1
#: An answer that takes longer begins as a stream; then nothing is silent for longer.
KEEP_ALIVE_INTERVAL_S = 0.25


class PushIntake:
    """One push on its way in, and the body of its answer where that is a stream (`training.exchange.messages`).

    `accept` adds some of the `items`; `refuse` answers for the shards that are malformed. A shard without a backup
    (`has_targets`) is added as it comes. The work ends when `results` is cancelled or the body is closed; what was
    added stays.
    """

    def __init__(
        self,
        push: Push,
        items: AsyncIterator[IncomingDelta],
        accept: Callable[[Push, list[IncomingDelta]], Awaitable[list[PushResult]]],
        refuse: Callable[[Push, list[int], BadFrame], list[PushResult]],
        has_targets: Callable[[int], bool],
    ) -> None:
        self._push = push
        self._items = items
        self._accept = accept
        self._refuse = refuse
        self._has_targets = has_targets
        self._results: dict[int, PushResult] = {}
        self._fresh: list[PushResult] = []
        self._is_fresh = asyncio.Event()
        self._parts: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._run(), name=f"push-{push.step}")
        self._task.add_done_callback(lambda _task: self._is_fresh.set())

    async def results(self, within_s: float | None) -> list[PushResult] | None:
        """All results, in the order of the push; None if that takes longer. Raises what reading or adding raised."""
        try:
            await asyncio.wait([self._task], timeout=within_s)
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if not self._task.done():
            return None
        self._task.result()
        return [self._results[shard] for shard in self._push.shards]

    def __aiter__(self) -> PushIntake:
        return self

    async def __anext__(self) -> bytes:
        """The results since the last piece, or a sign of life."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KEEP_ALIVE_INTERVAL_S):
                await self._is_fresh.wait()
        if self._task.done():
            if self._task.cancelled():
                raise StopAsyncIteration  # closed: the origin sends again what has no answer
            self._task.result()
            if not self._fresh:
                raise StopAsyncIteration
        else:
            self._is_fresh.clear()
        fresh, self._fresh = self._fresh, []
        return piece_of(fresh) if fresh else SIGN_OF_LIFE

    async def aclose(self) -> None:
        """End the work, if it is not done."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            await self._take_all()
        finally:
            for part in self._parts:
                part.cancel()
            await asyncio.gather(*self._parts, return_exceptions=True)

    async def _take_all(self) -> None:
        now, received, began_s = asyncio.get_running_loop().time, 0, 0.0
        items: list[IncomingDelta] = []
        try:
            async for item in self._items:
                received += 1
                if not self._has_targets(item.shard):
                    await self._add([item])  # while it is in the processor's cache
                    continue
                began_s = began_s if items else now()
                items.append(item)
                is_full = sum(one.delta.size for one in items) >= VALUES_PER_PART // (PARTS_AT_ONCE + 1)
                if is_full or (now() - began_s >= PART_S and len(self._parts) < PARTS_AT_ONCE):
                    await self._begin_part(items)
                    items = []
        except BadFrame as error:
            self._note(self._refuse(self._push, self._push.shards[received:], error))
        if items:
            await self._begin_part(items)
        while self._parts:
            await self._end_part()

    async def _begin_part(self, items: list[IncomingDelta]) -> None:
        while len(self._parts) >= PARTS_AT_ONCE:
            await self._end_part()
        self._parts.add(asyncio.create_task(self._add(items), name="push-part"))

    async def _end_part(self) -> None:
        done, self._parts = await asyncio.wait(self._parts, return_when=asyncio.FIRST_COMPLETED)
        for part in done:
            part.result()

    async def _add(self, items: list[IncomingDelta]) -> None:
        self._note(await self._accept(self._push, items))

    def _note(self, results: list[PushResult]) -> None:
        self._results |= {result.shard: result for result in results}
        self._fresh += results
        self._is_fresh.set()
