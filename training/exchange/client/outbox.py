"""The outbox: delivers encoded deltas to the owners of their shards, and retries under the same identity.

A delivery ends when every shard has a final answer (`ok` or `refused`). To each owner one delivery is sent at a time,
the oldest first, and of each shard one delta: what was sent at least once stays until it is answered, because its owner
may have added it. A later delta of the shard waits meanwhile. If it still waits when its exchange ends, no byte of it
was sent: it goes back to the trainer (`give_back`). So nothing is dropped for being late, and the outbox has one delta
of a shard between two exchanges. When it is full, older deltas of shards that no living node owns are dropped,
counted and logged; others never are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from overlay.peers import Contact
from overlay.transport import Buffer, SizedBody, TransportError
from training.cooperative import VALUES_PER_PART
from training.encoding.frames import BadFrame, Part, encoded_frames, sized
from training.exchange.context import ExchangeContext
from training.exchange.directory import OwnerDirectory
from training.exchange.messages import Push, PushAnswer, PushResult, read_results
from training.exchange.own_deltas import KEPT_BYTES, Acknowledged, Delivery, Outgoing
from training.exchange.owner.delta_item import IncomingDelta
from training.exchange.owner.deltas import DeltaHandler
from training.exchange.step_wait import Obstacles, together

FIRST_RETRY_S = 0.05
MAX_RETRY_S = 0.5
#: A shard of the trainer's memory of at most this size is copied, to be sent again. A larger one is not kept.
COPIED_BYTES = 1 << 16
#: Before a delivery that had a fault of this node goes on.
FAULT_PAUSE_S = 1.0


class OwnerTurns:
    """One delivery is sent to an owner at a time, in the order in which they ask."""

    def __init__(self) -> None:
        #: The lock of each, and how many hold it or wait for it.
        self._owners: dict[bytes, tuple[asyncio.Lock, list[None]]] = {}

    @asynccontextmanager
    async def of(self, owner: bytes) -> AsyncIterator[None]:
        """Wait for the turn with this owner; it lasts as long as the block."""
        lock, users = self._owners.setdefault(owner, (asyncio.Lock(), []))
        users.append(None)
        try:
            async with lock:
                yield
        finally:
            users.pop()
            if not users:
                self._owners.pop(owner, None)


class Outbox:
    """The deliveries of one node, by step."""

    def __init__(self, context: ExchangeContext, directory: OwnerDirectory, deltas: DeltaHandler) -> None:
        self._context = context
        self._store = context.store
        self._rpc = context.rpc
        self._counters = context.counters
        self._log = context.environment.log
        self._executor = context.environment.executor
        self._directory = directory
        self._deltas = deltas
        self._deliveries: dict[int, Delivery] = {}
        #: Set, and replaced, with each final answer.
        self._answered = asyncio.Event()
        self._turns = OwnerTurns()
        #: Why deltas wait.
        self.obstacles = Obstacles()

    @property
    def steps(self) -> list[int]:
        """Steps with shards that no owner has acknowledged yet."""
        return list(self._deliveries)

    @property
    def oldest_s(self) -> float:
        """How long the delivery has waited that has waited longest; 0 without any."""
        now = self._context.environment.clock.monotonic()
        return max((now - delivery.since for delivery in self._deliveries.values()), default=0.0)

    def add(self, delivery: Delivery) -> None:
        """Start a delivery."""
        delivery.since = self._context.environment.clock.monotonic()
        self._deliveries[delivery.push.step] = delivery
        self._context.kept.keep(delivery.identity, delivery.unacknowledged)
        self._drop_ownerless()
        self._start(delivery)

    @property
    def shards(self) -> set[int]:
        """Shards of which a delta has no answer."""
        return {shard for delivery in self._deliveries.values() for shard in delivery.unacknowledged}

    def give_back(self, delivery: Delivery) -> tuple[int, ...]:
        """Take out the shards of which no byte has been sent, and return them."""
        waiting = tuple(item.shard for item in delivery.unacknowledged.values() if not item.is_started)
        for shard in waiting:
            del delivery.unacknowledged[shard]
        if not delivery.unacknowledged and delivery.task is not None:
            delivery.task.cancel()
            self._end(delivery)  # a task that was cancelled before it began does not
        return waiting

    def note_apart(self) -> None:
        """No owner is in reach: what was begun to be sent keeps its identity, and is added however old it is."""
        for delivery in self._deliveries.values():
            delivery.push = msgspec.structs.replace(delivery.push, apart=True)

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
            delivery.refused_shards.add(result.shard)
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

    def _drop_ownerless(self) -> None:
        """Where the outbox is too large, drop older deltas of shards that no living node owns; the newest stays."""
        limit = self._context.settings.outbox_bytes
        size = sum(delivery.size_bytes for delivery in self._deliveries.values())
        for step in list(self._deliveries)[:-1]:
            if size <= limit:
                return
            delivery = self._deliveries[step]
            _, ownerless = self._directory.by_owner(delivery.unacknowledged)
            for shard in ownerless:
                size -= len(delivery.unacknowledged.pop(shard).encoded)
            if ownerless:
                self._counters.lost += len(ownerless)
                self._log.error("outbox_full_delta_dropped", step=step, shards=len(ownerless), limit=limit)
            if not delivery.unacknowledged and delivery.task is not None:
                delivery.task.cancel()

    # -- delivery -----------------------------------------------------------------------------------------------

    def _start(self, delivery: Delivery) -> None:
        delivery.task = asyncio.create_task(self._deliver(delivery), name=f"deliver-step-{delivery.push.step}")

    async def _deliver(self, delivery: Delivery) -> None:
        try:
            while True:
                try:
                    return await self._deliver_some(delivery, list(delivery.unacknowledged))
                except Exception as error:  # what an owner may have is sent until it is answered, whatever happens here
                    self._log.error("exchange_service_failed", service="outbox", error=repr(error))
                    await asyncio.sleep(FAULT_PAUSE_S)
        finally:
            if not delivery.interrupted:
                self._end(delivery)

    def _end(self, delivery: Delivery) -> None:
        self._deliveries.pop(delivery.push.step, None)
        self._context.kept.drop(delivery.identity)
        delivery.done.set()

    async def _deliver_some(self, delivery: Delivery, shards: list[int]) -> None:
        """Deliver the shards of one owner, and to whoever owns them then; no other owner is waited for."""
        pause_s = FIRST_RETRY_S
        while left := [shard for shard in shards if shard in delivery.unacknowledged]:
            groups, unknown = self._directory.by_owner(left)
            if unknown:
                self._log.debug("owner_unknown", shards=len(unknown))
            if len(groups) + bool(unknown) > 1:
                parts = [theirs for _, theirs in groups] + ([unknown] if unknown else [])
                await together(self._deliver_some(delivery, part) for part in parts)
                return
            for owner, theirs in groups:
                if not await self._send(delivery, owner, theirs):
                    # Behind an older delta: the shards are sent as soon as that has its answer.
                    await self._wait_for_answer(MAX_RETRY_S)
                    break
            else:
                pause_s = await self._pause(delivery, left, pause_s)

    async def _pause(self, delivery: Delivery, left: list[int], pause_s: float) -> float:
        """After an attempt: wait, and look for other owners, if not all have their answers; returns the next pause."""
        after = [shard for shard in left if shard in delivery.unacknowledged]
        if not after:
            return pause_s
        if len(after) < len(left):
            pause_s = FIRST_RETRY_S
        await asyncio.sleep(pause_s * self._context.jitter())
        await self._directory.refresh(after)
        return min(2 * pause_s, MAX_RETRY_S)

    async def _wait_for_answer(self, at_most_s: float) -> None:
        """Wait until some shard of any delivery has its final answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                await self._answered.wait()

    def _not_behind(self, delivery: Delivery, shards: list[int]) -> list[int]:
        """Those of the shards of which no older delta is on its way."""
        # Promise 10: what waits has not been sent, and can go back to the trainer.
        older = [one for step, one in self._deliveries.items() if step < delivery.push.step]
        return [
            shard
            for shard in shards
            if not any(shard in one.unacknowledged and one.unacknowledged[shard].is_started for one in older)
        ]

    async def _send(self, delivery: Delivery, owner: Contact, shards: list[int]) -> bool:
        """Send the shards of one owner when it is their turn, and settle its answers; False if all of them are behind
        older deltas."""
        async with self._turns.of(owner.node_id):
            groups, _ = self._directory.by_owner([shard for shard in shards if shard in delivery.unacknowledged])
            # The owner may have changed while they waited.
            theirs = next((group for to, group in groups if to.node_id == owner.node_id), [])
            shards = self._not_behind(delivery, theirs)
            items = [delivery.unacknowledged[shard] for shard in shards]
            if not items:
                return not theirs
            # Promise 1: its owner may have it from now on, so it is sent until it is answered.
            for item in items:
                item.is_started = True
            push = msgspec.structs.replace(
                delivery.push,
                shards=shards,
                fences=self._store.ownership.stale_fences(shards),
                streams=True,
                keeps=True,
            )
            if owner.node_id == push.node:
                for result in await self._accept_own(push, items):
                    self._settle(delivery, owner, result)
                return True
            asked_s = self._context.environment.clock.monotonic()
            try:
                await self._request(delivery, push, owner, items)
            except TransportError as error:
                self._note_obstacle(delivery, shards, owner, error.detail, asked_s)
                self._directory.failed(owner, error)
            except BadFrame as error:
                self._note_obstacle(delivery, shards, owner, f"bad answer: {error}", asked_s)
                self._context.nonsense(owner.node_id, "push")
                self._log.warning("bad_push_answer", owner=owner.node_id.hex()[:8], reason=str(error))
            return True

    async def _request(self, delivery: Delivery, push: Push, owner: Contact, items: list[Outgoing]) -> None:
        """One request; results count as they come, whatever becomes of the rest. Raises `TransportError` and
        `BadFrame`."""

        def stream() -> Iterator[Buffer]:
            for item in items:
                for buffer in encoded_frames(item.shard, item.encoded, item.codec, Part.DELTA, step=push.step):
                    self._counters.bytes_sent += len(buffer)
                    yield buffer

        body = sized(stream(), sum(item.framed_bytes for item in items))
        asked_s = self._context.environment.clock.monotonic()
        async with AsyncExitStack() as stack:
            if delivery.wait is not None and isinstance(body, SizedBody):
                key = owner.node_id, tuple(push.shards)
                stack.enter_context(delivery.wait.watching(key, body.moved_bytes))
            answer = await stack.enter_async_context(self._rpc.request("push", owner, push, body))
            first = self._rpc.decoded(owner, answer.head, PushAnswer)
            self._context.view.compare_count(owner.node_id, first.workers)
            self._settle_all(delivery, owner, first.results, push.shards, asked_s)
            if first.streams:
                async for results in read_results(answer.body):
                    self._settle_all(delivery, owner, results, push.shards, asked_s)

    def _note_obstacle(
        self, delivery: Delivery, shards: Sequence[int], owner: Contact, reason: str, asked_s: float
    ) -> None:
        self.obstacles.note([shard for shard in shards if shard in delivery.unacknowledged], owner, reason, asked_s)

    def _settle_all(
        self, delivery: Delivery, owner: Contact, results: list[PushResult], sent: list[int], asked_s: float
    ) -> None:
        asked = dict.fromkeys(sent)
        if any(result.shard not in asked for result in results):
            raise BadFrame("it names a shard that was not sent")
        self._directory.answered(owner, results)
        for result in results:
            self._settle(delivery, owner, result)
            if result.status == "retry":
                self._note_obstacle(delivery, [result.shard], owner, f"answers {result.reason!r}", asked_s)
        if delivery.wait is not None and any(result.status in ("ok", "refused") for result in results):
            delivery.wait.note()

    async def _accept_own(self, push: Push, items: list[Outgoing]) -> list[PushResult]:
        """Add the shards that this node owns, a part of the delta at a time."""
        turns, results, part, values = self._context.turns, [], list[IncomingDelta](), 0
        for number, item in enumerate(items, 1):
            part.append(await turns.run(self._executor, item.values, item.item))
            values += item.values
            if values >= VALUES_PER_PART or number == len(items):
                results += await self._deltas.accept(push, part)
                part, values = [], 0
        return results

    def _settle(self, delivery: Delivery, owner: Contact, result: PushResult) -> None:
        if result.shard not in delivery.unacknowledged:
            return
        if result.status in ("ok", "refused"):
            item = delivery.unacknowledged.pop(result.shard)
            self.obstacles.clear(result.shard)
            if result.status == "ok":
                self._keep(delivery.push, owner, item)
            self._answered.set()
            self._answered = asyncio.Event()
            self.count(delivery, result)
        elif result.owner_info is not None:
            self._store.note_owners([result.owner_info])

    def _keep(self, push: Push, owner: Contact, item: Outgoing) -> None:
        """Keep what another node has acknowledged: it may lose it."""
        context = self._context
        if owner.node_id == push.node or (item.is_borrowed and len(item.encoded) > COPIED_BYTES):
            return
        # Promise 1: an owner without a backup may be started again with less.
        encoded = bytes(item.encoded) if item.is_borrowed else item.encoded
        now_s = context.environment.clock.monotonic()
        if not context.swarm.is_eligible:
            # It owns and backs up nothing, so the room of its repair log is free; and its owner may have no backup.
            log = context.store.log
            context.acknowledged.limit_bytes = max(KEPT_BYTES, log.limit_bytes - log.size_bytes)
        context.acknowledged.note(
            item.shard, Acknowledged(push, owner.node_id, now_s, item.codec, item.values, encoded)
        )
