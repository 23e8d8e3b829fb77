"""The origin's side of a push: encode once, deliver to every owner, keep what is not acknowledged, retry under the same
identity. What this node owns alone it adds at once, as exact as it is.

A step waits for its acknowledgements until a deadline (without one under bsp); what is missing by then stays in the
outbox and is delivered in the background. A refusal is final and counted. The outbox is bounded in bytes: when it is
full, the oldest delta goes, with an event that names it. What a lossy codec rounds off is kept here and added to the
next delta (error feedback).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from overlay.peers import Contact
from overlay.transport import Buffer, TransportError
from training.encoding import codecs
from training.encoding.codecs import CodecName, Vector
from training.encoding.frames import Part, encoded_frames, framed_bytes, sized
from training.exchange.context import ExchangeContext
from training.exchange.cooperative import VALUES_A_TURN, LoopYielder
from training.exchange.directory import OwnerDirectory
from training.exchange.messages import Push, PushAnswer, PushResult
from training.exchange.owner.delta_item import IncomingDelta
from training.exchange.owner.deltas import DeltaHandler

RETRY_FIRST_S = 0.05
RETRY_MOST_S = 0.5


@dataclass(slots=True)
class Outgoing:
    """One shard of a delta on its way, as it goes over the wire; `values` is the number it decodes to.

    A memoryview is the trainer's own memory: it holds while the step waits for its answers, and not a moment longer.
    """

    shard: int
    encoded: bytes | bytearray | memoryview
    codec: CodecName
    values: int

    @property
    def framed_bytes(self) -> int:
        return framed_bytes(self.codec, self.values)

    def item(self) -> IncomingDelta:
        """As its owner gets it, to keep."""
        encoded = bytes(self.encoded) if isinstance(self.encoded, memoryview) else self.encoded
        return IncomingDelta(self.shard, codecs.decoded(encoded, self.codec, self.values), encoded, self.codec)


@dataclass(slots=True)
class Delivery:
    """One step's delta: what is still unacknowledged, and what became of the rest."""

    push: Push
    waiting: dict[int, Outgoing]
    done: asyncio.Event
    acknowledged: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    abandoned: bool = False
    #: Interrupted, to go on with memory of its own.
    interrupted: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def size_bytes(self) -> int:
        return sum(len(item.encoded) for item in self.waiting.values())


@dataclass(frozen=True, slots=True)
class PushReport:
    """How a push went: shards acknowledged, refused (by reason), and still in the outbox."""

    acknowledged: int
    refused: dict[str, int]
    outstanding: int
    bytes_sent: int


class PushClient:
    """Delivers this node's deltas."""

    def __init__(self, context: ExchangeContext, finding: OwnerDirectory, serving: DeltaHandler) -> None:
        self._context = context
        self._swarm = context.swarm
        self._store = context.store
        self._run = context.run
        self._rpc = context.rpc
        self._counters = context.counters
        self._log = context.environment.log
        self._executor = context.environment.executor
        self._finding = finding
        self._serving = serving
        self._deliveries: dict[int, Delivery] = {}
        self._residual: Vector | None = None
        #: Shards whose slice of the residual is not all zeros.
        self._owing: set[int] = set()
        self._turns = _turns(self._store.bounds)

    @property
    def outstanding_steps(self) -> list[int]:
        """Steps with shards that no owner has acknowledged yet."""
        return list(self._deliveries)

    async def push(self, step: int, base_step: int, weight: float, delta: Vector) -> PushReport:
        """Send the delta of a step, `float32[total]`; returns when every shard has its answer, or at the deadline."""
        sent_before = self._counters.bytes_sent
        push = Push(
            genesis=self._context.genesis,
            node=self._swarm.node_id,
            incarnation=self._run.incarnation,
            step=step,
            base_step=base_step,
            weight=weight,
            shards=[],
        )
        delivery = Delivery(push, {}, asyncio.Event())
        rest = await self._add_alone(delivery, delta)
        if rest:
            await self._send_out(delivery, rest, delta)
        return PushReport(
            delivery.acknowledged,
            dict(delivery.refused),
            len(delivery.waiting),
            self._counters.bytes_sent - sent_before,
        )

    async def _add_alone(self, delivery: Delivery, delta: Vector) -> list[int]:
        """Add what this node owns and nobody else has to have; returns the other shards."""
        bounds = self._store.bounds
        results: dict[int, PushResult] = {}
        for turn, shards in enumerate(self._turns if self._serving.alone(range(len(bounds))) else []):
            if turn:
                await asyncio.sleep(0)
            mine = self._serving.alone(shards)
            # One look at a turn's values where all of them are ours; otherwise at each part, before it is added.
            values = delta[bounds[shards[0]][0] : bounds[shards[-1]][1]]
            is_finite = len(mine) == len(shards) and codecs.all_finite(values)
            plain = ((shard, delta[slice(*bounds[shard])]) for shard in mine if shard not in self._owing)
            results |= self._serving.add_alone(delivery.push, plain, is_finite=is_finite)
            owing = (
                (shard, delta[slice(*bounds[shard])] + self._owed(shard)) for shard in mine if shard in self._owing
            )
            results |= self._serving.add_alone(delivery.push, owing, is_finite=False)
        for shard, result in results.items():
            self._count(delivery, result)
            self._settle_debt(shard)
        return [shard for shard in range(len(bounds)) if shard not in results]

    async def _send_out(self, delivery: Delivery, shards: list[int], delta: Vector) -> None:
        """Encode and deliver; returns when every shard has its answer, or at the deadline."""
        if self._context.settings.codec == "float32":
            outgoing = self._encode(delta, shards)  # nothing is computed, nor copied
        else:
            outgoing = await self._executor.run(self._encode, delta, shards)
        delivery.waiting = {item.shard: item for item in outgoing}
        step = delivery.push.step
        self._deliveries[step] = delivery
        self._bound_outbox()
        self._start(delivery)
        timeout_s = None if self._context.synchronous else self._context.settings.push_deadline_s
        try:
            async with asyncio.timeout(timeout_s):
                await delivery.done.wait()
        except TimeoutError:
            self._log.warning("push_unfinished", step=step, shards=len(delivery.waiting))
            await self._keep(delivery)

    def _start(self, delivery: Delivery) -> None:
        delivery.task = asyncio.create_task(self._deliver(delivery), name=f"deliver-step-{delivery.push.step}")

    async def _keep(self, delivery: Delivery) -> None:
        """The trainer is about to write its memory anew: what is still on its way goes on from a copy. A request that
        is half sent is broken off, and its shards are sent again under their identity."""
        if delivery.task is None or not any(isinstance(item.encoded, memoryview) for item in delivery.waiting.values()):
            return
        delivery.interrupted = True
        delivery.task.cancel()
        await asyncio.gather(delivery.task, return_exceptions=True)
        delivery.interrupted = False
        for item in delivery.waiting.values():
            if isinstance(item.encoded, memoryview):
                item.encoded = bytes(item.encoded)
        self._start(delivery)

    async def finish(self, timeout_s: float) -> int:
        """Give the outbox a last chance; returns how many steps are still in it."""
        tasks = [delivery.task for delivery in self._deliveries.values() if delivery.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        return len(self._deliveries)

    async def stop(self) -> None:
        """End every delivery."""
        tasks = [delivery.task for delivery in self._deliveries.values() if delivery.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- encoding -----------------------------------------------------------------------------------------------

    def _encode(self, delta: Vector, shards: list[int]) -> list[Outgoing]:
        codec = self._context.settings.codec
        outgoing = []
        for shard in shards:
            start, stop = self._store.bounds[shard]
            part = delta[start:stop]
            if codec == "float32":
                encoded: codecs.Encoded = codecs.as_bytes(part)
            else:
                encoded = codecs.encode_with_feedback(part, self._owed(shard), codec)
                self._owing.add(shard)
            outgoing.append(Outgoing(shard, encoded, codec, stop - start))
        return outgoing

    # -- error feedback: what a lossy codec rounded off goes with the next delta ---------------------------------

    def _owed(self, shard: int) -> Vector:
        """The shard's slice of the residual, to be written."""
        if self._residual is None:
            self._residual = np.zeros(self._store.bounds[-1][1], dtype=np.float32)
        start, stop = self._store.bounds[shard]
        return self._residual[start:stop]

    def _settle_debt(self, shard: int) -> None:
        if shard in self._owing:
            self._owing.discard(shard)
            self._owed(shard)[:] = 0.0

    def _bound_outbox(self) -> None:
        limit = self._context.settings.outbox_bytes
        size = sum(delivery.size_bytes for delivery in self._deliveries.values())
        for step in list(self._deliveries)[:-1]:
            if size <= limit:
                return
            delivery = self._deliveries.pop(step)
            size -= delivery.size_bytes
            delivery.abandoned = True
            self._counters.lost += len(delivery.waiting)
            self._log.error("outbox_full_delta_dropped", step=step, shards=len(delivery.waiting), limit=limit)
            if delivery.task is not None:
                delivery.task.cancel()

    # -- delivery -----------------------------------------------------------------------------------------------

    async def _deliver(self, delivery: Delivery) -> None:
        pause_s = RETRY_FIRST_S
        try:
            while delivery.waiting:
                before = len(delivery.waiting)
                await self._round(delivery)
                if not delivery.waiting:
                    break
                if len(delivery.waiting) < before:
                    pause_s = RETRY_FIRST_S
                await asyncio.sleep(pause_s * self._context.jitter())
                pause_s = min(2 * pause_s, RETRY_MOST_S)
                await self._finding.refresh(list(delivery.waiting))
        finally:
            if not delivery.interrupted:
                if not delivery.abandoned:
                    self._deliveries.pop(delivery.push.step, None)
                delivery.done.set()

    async def _round(self, delivery: Delivery) -> None:
        groups, unknown = self._finding.by_owner(list(delivery.waiting))
        if unknown:
            self._log.debug("owner_unknown", shards=len(unknown))
        jobs = [self._send(delivery, owner, shards) for owner, shards in groups]
        for results in await asyncio.gather(*jobs):
            for result in results:
                self._settle(delivery, result)

    async def _send(self, delivery: Delivery, owner: Contact, shards: list[int]) -> list[PushResult]:
        push = msgspec.structs.replace(delivery.push, shards=shards, fences=self._store.ownership.stale_fences(shards))
        items = [delivery.waiting[shard] for shard in shards]
        if owner.node_id == self._swarm.node_id:
            turn, here = LoopYielder(), []
            for item in items:
                here.append(item.item())
                await turn.after(item.values)
            return await self._serving.accept(push, here)

        def stream() -> Iterator[Buffer]:
            for item in items:
                for buffer in encoded_frames(item.shard, item.encoded, item.codec, Part.DELTA, step=push.step):
                    self._counters.bytes_sent += len(buffer)
                    yield buffer

        try:
            body = sized(stream(), sum(item.framed_bytes for item in items))
            async with self._rpc.request("push", owner, push, body) as answer:
                results = self._rpc.decoded(owner, answer.head, PushAnswer).results
                self._finding.answered(owner, results)
                return results
        except TransportError as error:
            self._finding.failed(owner, error)
            return []

    def _settle(self, delivery: Delivery, result: PushResult) -> None:
        if result.shard not in delivery.waiting:
            return
        if result.status in ("ok", "refused"):
            del delivery.waiting[result.shard]
            self._count(delivery, result)
        elif result.where is not None:
            self._store.note([result.where])

    def _count(self, delivery: Delivery, result: PushResult) -> None:
        """Note a final answer."""
        if result.status == "ok":
            delivery.acknowledged += 1
        else:
            delivery.refused[result.reason] = delivery.refused.get(result.reason, 0) + 1
            self._counters.refused += 1


def _turns(bounds: Sequence[tuple[int, int]]) -> list[range]:
    """Shards in runs of about `VALUES_A_TURN` values each."""
    turns = []
    first = values = 0
    for shard, (start, stop) in enumerate(bounds):
        values += stop - start
        if values >= VALUES_A_TURN or shard == len(bounds) - 1:
            turns.append(range(first, shard + 1))
            first, values = shard + 1, 0
    return turns
