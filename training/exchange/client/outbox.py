"""The outbox: delivers encoded deltas to the owners of their shards, and retries under the same identity.

A delivery ends when every shard has a final answer (`ok` or `refused`). The outbox is bounded in bytes: when it is
full, the oldest delta is dropped, counted and logged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from overlay.peers import Contact
from overlay.transport import Buffer, TransportError
from training.encoding import codecs
from training.encoding.codecs import CodecName
from training.encoding.frames import Part, encoded_frames, framed_bytes, sized
from training.exchange.context import ExchangeContext
from training.exchange.cooperative import VALUES_PER_PART, LoopYielder
from training.exchange.directory import OwnerDirectory
from training.exchange.messages import Push, PushAnswer, PushResult
from training.exchange.owner.delta_item import IncomingDelta
from training.exchange.owner.deltas import DeltaHandler

FIRST_RETRY_S = 0.05
MAX_RETRY_S = 0.5


@dataclass(slots=True)
class Outgoing:
    """One encoded shard of a delta, and the number of values it decodes to.

    `is_borrowed`: it is the trainer's memory, which is valid only while the step waits for its answers.
    """

    shard: int
    encoded: bytes | bytearray | memoryview
    codec: CodecName
    values: int
    is_borrowed: bool = False

    @property
    def framed_bytes(self) -> int:
        return framed_bytes(self.codec, self.values, len(self.encoded))

    def item(self) -> IncomingDelta:
        """The same shard as its owner receives it; it refers to no memory of the trainer."""
        encoded = bytes(self.encoded) if self.is_borrowed else self.encoded
        return IncomingDelta(self.shard, codecs.decoded(encoded, self.codec, self.values), encoded, self.codec)


@dataclass(slots=True)
class Delivery:
    """The delta of one step: its unacknowledged shards, and the answers for the others."""

    push: Push
    unacknowledged: dict[int, Outgoing]
    done: asyncio.Event
    acknowledged: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    abandoned: bool = False
    #: Cancelled in order to continue from a copy of the trainer's memory.
    interrupted: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def size_bytes(self) -> int:
        return sum(len(item.encoded) for item in self.unacknowledged.values())


class Outbox:
    """The deliveries of one node, by step."""

    def __init__(self, context: ExchangeContext, directory: OwnerDirectory, deltas: DeltaHandler) -> None:
        self._context = context
        self._store = context.store
        self._rpc = context.rpc
        self._counters = context.counters
        self._log = context.environment.log
        self._directory = directory
        self._deltas = deltas
        self._deliveries: dict[int, Delivery] = {}

    @property
    def steps(self) -> list[int]:
        """Steps with shards that no owner has acknowledged yet."""
        return list(self._deliveries)

    def add(self, delivery: Delivery) -> None:
        """Start a delivery; drops older ones where the outbox is too large now."""
        self._deliveries[delivery.push.step] = delivery
        self._drop_oldest()
        self._start(delivery)

    async def detach(self, delivery: Delivery) -> None:
        """Continue a delivery from a copy, because the trainer is about to overwrite its memory.

        A request that is half sent is aborted; its shards are sent again under the same identity.
        """
        items = delivery.unacknowledged.values()
        if delivery.task is None or not any(item.is_borrowed for item in items):
            return
        delivery.interrupted = True
        delivery.task.cancel()
        await asyncio.gather(delivery.task, return_exceptions=True)
        delivery.interrupted = False
        for item in delivery.unacknowledged.values():
            if item.is_borrowed:
                item.encoded, item.is_borrowed = bytes(item.encoded), False
        self._start(delivery)

    def count(self, delivery: Delivery, result: PushResult) -> None:
        """Record a final answer."""
        if result.status == "ok":
            delivery.acknowledged += 1
        else:
            delivery.refused[result.reason] = delivery.refused.get(result.reason, 0) + 1
            self._counters.refused += 1

    async def finish(self, timeout_s: float) -> int:
        """Wait for the deliveries; returns how many steps are unacknowledged at the end."""
        tasks = self._tasks()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        return len(self._deliveries)

    async def stop(self) -> None:
        """Cancel every delivery."""
        tasks = self._tasks()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [delivery.task for delivery in self._deliveries.values() if delivery.task is not None]

    def _drop_oldest(self) -> None:
        limit = self._context.settings.outbox_bytes
        size = sum(delivery.size_bytes for delivery in self._deliveries.values())
        for step in list(self._deliveries)[:-1]:
            if size <= limit:
                return
            delivery = self._deliveries.pop(step)
            size -= delivery.size_bytes
            delivery.abandoned = True
            shards = len(delivery.unacknowledged)
            self._counters.lost += shards
            self._log.error("outbox_full_delta_dropped", step=step, shards=shards, limit=limit)
            if delivery.task is not None:
                delivery.task.cancel()

    # -- delivery -----------------------------------------------------------------------------------------------

    def _start(self, delivery: Delivery) -> None:
        delivery.task = asyncio.create_task(self._deliver(delivery), name=f"deliver-step-{delivery.push.step}")

    async def _deliver(self, delivery: Delivery) -> None:
        pause_s = FIRST_RETRY_S
        try:
            while delivery.unacknowledged:
                before = len(delivery.unacknowledged)
                groups, unknown = self._directory.by_owner(list(delivery.unacknowledged))
                if unknown:
                    self._log.debug("owner_unknown", shards=len(unknown))
                for results in await asyncio.gather(*(self._send(delivery, to, shards) for to, shards in groups)):
                    for result in results:
                        self._settle(delivery, result)
                if not delivery.unacknowledged:
                    break
                if len(delivery.unacknowledged) < before:
                    pause_s = FIRST_RETRY_S
                await asyncio.sleep(pause_s * self._context.jitter())
                pause_s = min(2 * pause_s, MAX_RETRY_S)
                await self._directory.refresh(list(delivery.unacknowledged))
        finally:
            if not delivery.interrupted:
                if not delivery.abandoned:
                    self._deliveries.pop(delivery.push.step, None)
                delivery.done.set()

    async def _send(self, delivery: Delivery, owner: Contact, shards: list[int]) -> list[PushResult]:
        push = msgspec.structs.replace(delivery.push, shards=shards, fences=self._store.ownership.stale_fences(shards))
        items = [delivery.unacknowledged[shard] for shard in shards]
        if owner.node_id == push.node:
            return await self._accept_own(push, items)

        def stream() -> Iterator[Buffer]:
            for item in items:
                for buffer in encoded_frames(item.shard, item.encoded, item.codec, Part.DELTA, step=push.step):
                    self._counters.bytes_sent += len(buffer)
                    yield buffer

        try:
            body = sized(stream(), sum(item.framed_bytes for item in items))
            async with self._rpc.request("push", owner, push, body) as answer:
                results = self._rpc.decoded(owner, answer.head, PushAnswer).results
                self._directory.answered(owner, results)
                return results
        except TransportError as error:
            self._directory.failed(owner, error)
            return []

    async def _accept_own(self, push: Push, items: list[Outgoing]) -> list[PushResult]:
        """Add the shards that this node owns, a part of the delta at a time."""
        yielder, results, part, values = LoopYielder(), [], list[IncomingDelta](), 0
        for number, item in enumerate(items, 1):
            part.append(item.item())
            values += item.values
            await yielder.after(item.values)
            if values >= VALUES_PER_PART or number == len(items):
                results += await self._deltas.accept(push, part)
                part, values = [], 0
        return results

    def _settle(self, delivery: Delivery, result: PushResult) -> None:
        if result.shard not in delivery.unacknowledged:
            return
        if result.status in ("ok", "refused"):
            del delivery.unacknowledged[result.shard]
            self.count(delivery, result)
        elif result.owner_info is not None:
            self._store.note_owners([result.owner_info])
