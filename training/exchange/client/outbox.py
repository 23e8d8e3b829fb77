"""The outbox: delivers encoded deltas to the owners of their shards, and retries under the same identity.

A delivery ends when every shard has a final answer (`ok` or `refused`). To each owner one delivery is sent at a time,
the oldest first, and of each shard one delta: what was sent at least once stays until it is answered, because its owner
may have added it. A later delta of the shard waits meanwhile. If it still waits when its exchange ends, no byte of it
was sent: it goes back to the trainer (`give_back`). So nothing is dropped, and the outbox has one delta of a shard
between two exchanges.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from weakref import WeakValueDictionary

import msgspec

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import Buffer, SizedBody, TransportError
from p2pnode.training.cooperative import VALUES_PER_PART
from p2pnode.training.encoding.frames import BadFrame, Part, encoded_frames, sized
from p2pnode.training.exchange.delta import KEPT_BYTES, Delivery, IncomingDelta, Outgoing, SentDeltas
from p2pnode.training.exchange.directory import MAX_RETRY_S, OwnerDirectory
from p2pnode.training.exchange.messages import KNOWN, Push, PushAnswer, PushResult, read_results
from p2pnode.training.exchange.owner.deltas import DeltaHandler
from p2pnode.training.exchange.rpc import ExchangeRpc
from p2pnode.training.exchange.run_state import Counters, SwarmView
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.timeouts import Obstacles
from p2pnode.training.swarm import Swarm

#: A shard of the trainer's memory of at most this size is copied, to be sent again. A larger one is not kept.
COPIED_BYTES = 1 << 16
#: Before a delivery that had a fault of this node goes on.
FAULT_PAUSE_S = 1.0


@dataclass(eq=False)
class Outbox:
    """The deliveries of one node."""

    sent: SentDeltas
    swarm: Swarm
    store: ShardStore
    view: SwarmView
    rpc: ExchangeRpc
    directory: OwnerDirectory
    deltas: DeltaHandler
    counters: Counters
    environment: Environment

    def __post_init__(self) -> None:
        self._clock = self.environment.clock
        self._log = self.environment.log
        #: Set, and replaced, with each final answer.
        self._answered = asyncio.Event()
        #: Promise 10: a line carries the oldest delivery first, so one at a time is sent to an owner.
        self._turns: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        #: Why deltas wait.
        self.obstacles = Obstacles()
        self._late: dict[int, int] = {}

    @property
    def steps(self) -> list[int]:
        """Steps with shards that no owner has acknowledged yet."""
        return list(self.sent.deliveries)

    @property
    def oldest_s(self) -> float:
        """How long the delivery has waited that has waited longest; 0 without any."""
        now = self._clock.monotonic()
        return max((now - delivery.since for delivery in self.sent.deliveries.values()), default=0.0)

    @property
    def shards(self) -> set[int]:
        """Shards of which a delta has no answer."""
        return {shard for delivery in self.sent.deliveries.values() for shard in delivery.unacknowledged}

    def take_late(self) -> dict[int, int]:
        """Shards of which a delta was acknowledged since the last call, but after its push had returned, or by its
        identity. A pulled value of an earlier version than this may lack the delta."""
        late, self._late = self._late, {}
        return late

    def add(self, delivery: Delivery) -> None:
        """Start a delivery."""
        delivery.since = self._clock.monotonic()
        self.sent.deliveries[delivery.push.step] = delivery
        self._start(delivery)

    def give_back(self, delivery: Delivery) -> tuple[int, ...]:
        """Take out the shards of which no byte has been sent, and return them."""
        waiting = tuple(item.shard for item in delivery.unacknowledged.values() if not item.is_started)
        for shard in waiting:
            del delivery.unacknowledged[shard]
        if not delivery.unacknowledged and delivery.task is not None:
            delivery.task.cancel()
            self._end(delivery)
        return waiting

    def note_apart(self) -> None:
        """No owner is in reach: mark what was begun to be sent. An owner adds it later, however old it is."""
        for delivery in self.sent.deliveries.values():
            delivery.push = msgspec.structs.replace(delivery.push, apart=True)

    async def detach(self, delivery: Delivery) -> None:
        """Continue a delivery from a copy, because the trainer is about to overwrite its memory.

        A request that is half sent is aborted; its shards are sent again under the same identity.
        """
        if delivery.task is None or not any(item.is_borrowed for item in delivery.unacknowledged.values()):
            return
        delivery.task.cancel()
        await asyncio.gather(delivery.task, return_exceptions=True)
        delivery.unacknowledged = {shard: item.own() for shard, item in delivery.unacknowledged.items()}
        self._start(delivery)

    def note_answer(self, delivery: Delivery, result: PushResult) -> None:
        """Record a final answer."""
        report = delivery.report
        if result.status == "ok":
            report.acknowledged += 1
        else:
            report.refused[result.reason] = report.refused.get(result.reason, 0) + 1
            report.refused_shards.add(result.shard)
            self.counters.refused += 1

    async def finish(self, timeout_s: float) -> int:
        """Wait for the deliveries; returns how many steps are unacknowledged at the end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for delivery in list(self.sent.deliveries.values()):
                    await delivery.done.wait()
        return len(self.sent.deliveries)

    async def stop(self) -> None:
        """Cancel every delivery."""
        deliveries = list(self.sent.deliveries.values())
        tasks = [delivery.task for delivery in deliveries if delivery.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for delivery in deliveries:
            self._end(delivery)

    # -- delivery -----------------------------------------------------------------------------------------------

    def _start(self, delivery: Delivery) -> None:
        delivery.task = asyncio.create_task(self._deliver(delivery), name=f"deliver-step-{delivery.push.step}")

    async def _deliver(self, delivery: Delivery) -> None:
        while delivery.unacknowledged:
            try:
                left = delivery.unacknowledged
                await self.directory.ask_owners(list(left), left, partial(self._ask, delivery), self.obstacles)
            except Exception as error:  # what an owner may have is sent until it is answered, whatever happens here
                self._log.error("exchange_service_failed", service="outbox", error=repr(error))
                await asyncio.sleep(FAULT_PAUSE_S)
        self._end(delivery)

    def _end(self, delivery: Delivery) -> None:
        self.sent.deliveries.pop(delivery.push.step, None)
        delivery.done.set()

    async def _ask(self, delivery: Delivery, owner: Contact, shards: list[int]) -> None:
        while not await self._send(delivery, owner, shards):
            # Behind an older delta: the shards are sent as soon as that has its answer.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(MAX_RETRY_S):
                    await self._answered.wait()

    def _not_behind(self, delivery: Delivery, shards: list[int]) -> list[int]:
        """Those of the shards of which no older delta is on its way."""
        # Promise 10 (docs/faults.md): what waits has not been sent, and can go back to the trainer.
        older = [one.unacknowledged for one in self.sent.deliveries.values() if one.push.step < delivery.push.step]
        return [shard for shard in shards if not any(shard in one and one[shard].is_started for one in older)]

    async def _send(self, delivery: Delivery, owner: Contact, shards: list[int]) -> bool:
        """Wait for the turn of this owner, send it those of the shards that it still owns, and settle its answers.

        False if nothing was sent because an older delta of each of these shards has no answer yet."""
        turn = self._turns.setdefault(owner.node_id, asyncio.Lock())
        async with turn:
            groups, _ = self.directory.by_owner([shard for shard in shards if shard in delivery.unacknowledged])
            # The owner may have changed while they waited.
            theirs = next((group for to, group in groups if to.node_id == owner.node_id), [])
            shards = self._not_behind(delivery, theirs)
            items = [delivery.unacknowledged[shard] for shard in shards]
            if not items:
                is_behind = bool(theirs)  # otherwise there was nothing left to send
                return not is_behind
            # Promise 1: its owner may have it from now on, so it is sent until it is answered.
            for item in items:
                item.is_started = True
            push = msgspec.structs.replace(
                delivery.push,
                shards=shards,
                fences=self.store.ownership.stale_fences(shards),
            )
            if owner.node_id == push.node:
                for result in await self._accept_own(push, items):
                    self._settle(delivery, owner, result)
                return True
            asked_s = self._clock.monotonic()
            try:
                await self._request(delivery, push, owner, items, asked_s)
            except TransportError as error:
                self._note_obstacle(delivery, shards, owner, error.detail, asked_s)
                self.directory.failed(owner, error)
            except BadFrame as error:
                self._note_obstacle(delivery, shards, owner, f"bad answer: {error}", asked_s)
                self.view.score.nonsense(owner.node_id, "push")
                self._log.warning("bad_push_answer", owner=owner.node_id.hex()[:8], reason=str(error))
            return True

    async def _request(
        self, delivery: Delivery, push: Push, owner: Contact, items: list[Outgoing], asked_s: float
    ) -> None:
        """One request; results count as they come, whatever becomes of the rest. Raises `TransportError` and
        `BadFrame`."""

        def stream() -> Iterator[Buffer]:
            for item in items:
                for buffer in encoded_frames(item.shard, item.encoded, item.codec, Part.DELTA, step=push.step):
                    self.counters.bytes_sent += len(buffer)
                    yield buffer

        body = sized(stream(), sum(item.framed_bytes for item in items))
        async with AsyncExitStack() as stack:
            if delivery.wait is not None and isinstance(body, SizedBody):
                key = owner.node_id, tuple(push.shards)
                stack.enter_context(delivery.wait.watching(key, body.moved_bytes))
            answer = await stack.enter_async_context(self.rpc.request("push", owner, push, body))
            first = self.rpc.decoded(owner, answer.head, PushAnswer)
            self.view.compare_count(owner.node_id, first.workers)
            self._settle_all(delivery, owner, first.results, push.shards, asked_s)
            async for results in read_results(answer.body):
                self._settle_all(delivery, owner, results, push.shards, asked_s)

    def _note_obstacle(
        self, delivery: Delivery, shards: Iterable[int], owner: Contact, reason: str, asked_s: float
    ) -> None:
        self.obstacles.note([shard for shard in shards if shard in delivery.unacknowledged], owner, reason, asked_s)

    def _settle_all(
        self, delivery: Delivery, owner: Contact, results: list[PushResult], sent: list[int], asked_s: float
    ) -> None:
        asked = dict.fromkeys(sent)
        if any(result.shard not in asked for result in results):
            raise BadFrame("it names a shard that was not sent")
        self.directory.answered(owner, results)
        for result in results:
            self._settle(delivery, owner, result)
            if result.status == "retry":
                self._note_obstacle(delivery, [result.shard], owner, f"answers {result.reason!r}", asked_s)
        if delivery.wait is not None and any(result.status in ("ok", "refused") for result in results):
            delivery.wait.note()

    async def _accept_own(self, push: Push, items: list[Outgoing]) -> list[PushResult]:
        """Add the shards that this node owns, a part of the delta at a time."""
        results, part, values = list[PushResult](), list[IncomingDelta](), 0
        for number, item in enumerate(items, 1):
            part.append(await self.rpc.turns.run(self.environment.executor, item.values, item.item))
            values += item.values
            if values >= VALUES_PER_PART or number == len(items):
                results += await self.deltas.accept(push, part)
                part, values = [], 0
        return results

    def _settle(self, delivery: Delivery, owner: Contact, result: PushResult) -> None:
        if result.shard not in delivery.unacknowledged:
            return
        if result.status in ("ok", "refused"):
            item = delivery.unacknowledged.pop(result.shard)
            self.obstacles.clear(result.shard)
            if result.status == "ok":
                is_exact = delivery.wait is not None and result.reason != KNOWN
                (delivery.report.versions if is_exact else self._late)[result.shard] = result.version
                self._keep(delivery.push, owner, item)
            self._answered.set()
            self._answered = asyncio.Event()
            self.note_answer(delivery, result)
        elif result.owner_info is not None:
            self.store.note_owners([result.owner_info])

    def _keep(self, push: Push, owner: Contact, item: Outgoing) -> None:
        """Keep what another node has acknowledged: it may lose it."""
        if owner.node_id == push.node or (item.is_borrowed and len(item.encoded) > COPIED_BYTES):
            return
        limit_bytes, log = KEPT_BYTES, self.store.log
        if not self.swarm.is_eligible:
            # It owns and backs up nothing, so the room of its repair log is free; and its owner may have no backup.
            limit_bytes = max(limit_bytes, log.limit_bytes - log.size_bytes)
        self.sent.acknowledge(push, owner.node_id, item.own(), limit_bytes)
