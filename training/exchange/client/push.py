"""Pushes this node's deltas: adds its own unreplicated shards at once, encodes and delivers the others to their owners.

A push returns when every shard has its answer, or when nothing of those that have none has moved for the deadline
(under bsp there is none). Shards without an answer stay in the outbox, which continues in the background. A refusal is
final and counted.

Shards of an earlier delta that were never sent are taken back from the outbox and added to this one, so that nothing is
dropped for being late. What is added is scaled by the quotient of both weights: each delta counts with its own weight,
as if it had been sent. Only where an owner clips or clamps does it see one delta instead of two.

While no owner is in reach the node trains on by itself (`OwnerDirectory.is_apart`): what it has not sent is put back
into the trainer's delta, and the next step begins with the whole of it. So one delta is kept, however long that lasts.
An owner adds it as one from the other side of a split, with the weight that a delta had before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from training.encoding import codecs
from training.encoding.codecs import Vector
from training.exchange.client.delivery import Delivery, Outgoing
from training.exchange.client.error_feedback import ErrorFeedback
from training.exchange.client.outbox import Outbox
from training.exchange.context import ExchangeContext
from training.exchange.cooperative import VALUES_PER_PASS, VALUES_PER_TURN, ThreadPauses
from training.exchange.directory import OwnerDirectory
from training.exchange.messages import Push, PushResult
from training.exchange.obstacles import Obstacles
from training.exchange.owner.deltas import DeltaHandler
from training.exchange.step_wait import StepWait
from training.shards.delta_range import is_delta_in_range
from training.shards.outer_rule import is_plain

#: A thread encodes 390,000 values as bfloat16, int8 or int4 in 0.2 ms, as sparse in 0.5 ms: then it pauses less often.
LIGHT_TURNS = 2


@dataclass(frozen=True, slots=True)
class PushReport:
    """How a push went: shards acknowledged, refused (by reason), and still in the outbox. `refused` grows when one of
    these is refused later."""

    acknowledged: int
    refused: dict[str, int]
    outstanding: int
    bytes_sent: int


class TakenBack:
    """Shards of earlier deltas, as parts of a delta of this weight. They stay encoded until they are added to it: all
    decoded they would be as large as the vector."""

    def __init__(self, taken: Sequence[tuple[Outgoing, Push]], weight: float) -> None:
        self._weight = weight
        self._parts: dict[int, list[tuple[Outgoing, float]]] = {}
        for item, push in taken:
            self._parts.setdefault(item.shard, []).append((item, push.weight))

    @property
    def shards(self) -> set[int]:
        return set(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __contains__(self, shard: int) -> bool:
        return shard in self._parts

    def of(self, shard: int) -> Vector:
        """The sum of what was taken back of a shard; decodes it."""
        found: Vector | None = None
        for item, weight in self._parts[shard]:
            values = np.array(codecs.decoded(item.encoded, item.codec, item.values), dtype=np.float32)
            if weight != self._weight:
                values *= np.float32(weight / self._weight)
            found = values if found is None else found + values
        assert found is not None
        return found


class PushClient:
    """Pushes the deltas of one node."""

    def __init__(self, context: ExchangeContext, directory: OwnerDirectory, deltas: DeltaHandler) -> None:
        self._context = context
        self._swarm = context.swarm
        self._store = context.store
        self._run = context.run
        self._counters = context.counters
        self._log = context.environment.log
        self._executor = context.environment.executor
        self._deltas = deltas
        self._directory = directory
        self._outbox = Outbox(context, directory, deltas)
        #: Since when no owner is in reach (monotonic seconds) and the step that was trained then; None: one is.
        self.apart_since: tuple[float, int] | None = None
        #: Those that were counted when an owner was in reach.
        self._workers = 1.0
        self._feedback = ErrorFeedback(self._store.bounds, context.settings.sparse_values)
        self._runs = _runs(self._store.bounds)
        self._is_last = False

    @property
    def outstanding_steps(self) -> list[int]:
        """Steps with shards that no owner has acknowledged yet."""
        return self._outbox.steps

    @property
    def outstanding_s(self) -> float:
        """How long the oldest of those steps has waited; 0 without any."""
        return self._outbox.oldest_s

    @property
    def obstacles(self) -> Obstacles:
        """Why deltas wait for their owners."""
        return self._outbox.obstacles

    async def push(
        self, step: int, base_step: int, weight: float, delta: Vector, on_taken: Callable[[], None] | None = None
    ) -> PushReport:
        """Send the delta of a step, `float32[total]`; returns when every shard has its answer, or at the deadline.

        Without `on_taken`, `delta` must not change before that. Otherwise `on_taken` is called once, as soon as it may:
        everything that is still to be sent is encoded or copied then.
        """
        sent_before, is_apart = self._counters.bytes_sent, self.apart_since is not None
        workers = max(1.0, self._context.view.worker_count())
        if is_apart:
            if self._context.settings.weight != "sum":
                weight *= workers / max(workers, self._workers)  # those that are out of reach train on, too
            if not await self._executor.run(is_delta_in_range, delta):
                return PushReport(0, {"not_finite": len(self._store)}, 0, 0)
        else:
            self._workers = workers
        push = Push(
            genesis=self._context.genesis,
            node=self._swarm.node_id,
            incarnation=self._run.incarnation,
            step=step,
            base_step=base_step,
            weight=weight,
            shards=[],
            workers=max(workers, self._workers),
            apart=is_apart,
        )
        delivery = Delivery(push, {}, asyncio.Event())
        returned = await self._take_back(delta, weight)
        try:
            rest = await self._add_unreplicated(delivery, delta, returned)
            if rest:
                encoded = await self._encode_all(rest, delta, returned, borrows=on_taken is None)
                delivery.unacknowledged = {item.shard: item for item in encoded}
        except BaseException:
            self._counters.lost += len(returned)
            raise
        if on_taken is not None:
            on_taken()
        if rest:
            limit_s = None if self._context.synchronous else self._context.settings.push_deadline_s
            delivery.wait = StepWait(limit_s)
            self._outbox.add(delivery)
        if rest and is_apart:
            delivery.wait = None
            await self._outbox.detach(delivery)
        elif rest:
            await self._deliver(delivery)
        return PushReport(
            delivery.acknowledged,
            delivery.refused,
            len(delivery.unacknowledged),
            self._counters.bytes_sent - sent_before,
        )

    async def prepare(self, delta: Vector, *, is_last: bool) -> None:
        """Add what sparse deltas lacked to the delta, `float32[total]`, that is pushed next. The last one of a run then
        leaves little out.

        The next step begins with a part of it or, with overlap, with all of it (`StepOrder.carry`). So the node trains
        on from what it has learned, and not once more what has not arrived yet.
        """
        self._is_last = is_last
        self._note_apart()
        if is_plain(self._context.codec.codec) and not self._context.synchronous:
            pauses = ThreadPauses(self._executor)
            await self._executor.run(self._feedback.move_to, delta, pauses.after)
        if self.apart_since is not None and await self._executor.run(is_delta_in_range, delta):
            await self._executor.run(self._put_back, self._outbox.take_apart(), delta)

    def _note_apart(self) -> None:
        """Whether the step that was just trained can be sent to nobody."""
        is_apart = not self._context.synchronous and self._directory.is_apart()
        now_s, step = self._context.environment.clock.monotonic(), self._run.step
        if is_apart and self.apart_since is None:
            self.apart_since = now_s, step
            self._log.warning("owners_out_of_reach", step=step)
        elif not is_apart and self.apart_since is not None:
            (since_s, since), self.apart_since = self.apart_since, None
            self._log.info("owners_in_reach", steps=step - since, seconds=round(now_s - since_s, 1))

    def _put_back(self, taken: Sequence[Outgoing], delta: Vector) -> None:
        """Add what was encoded for owners to a delta, `float32[total]`."""
        for item in taken:
            delta[slice(*self._store.bounds[item.shard])] += codecs.decoded(item.encoded, item.codec, item.values)

    async def finish(self, timeout_s: float) -> int:
        """Wait for the outbox; returns how many steps are still in it."""
        return await self._outbox.finish(timeout_s)

    async def stop(self) -> None:
        """Cancel every delivery."""
        await self._outbox.stop()

    async def _take_back(self, delta: Vector, weight: float) -> TakenBack:
        """What earlier deltas of this node have not begun to send, per shard, to be added to this one; nothing if this
        one is not finite, because it will be refused."""
        if not self._outbox.has_waiting or not await self._executor.run(is_delta_in_range, delta):
            return TakenBack([], weight)
        taken = self._outbox.take_back()
        if taken:
            self._log.debug("deltas_taken_back", shards=len(taken))
        return TakenBack(taken, weight)

    async def _add_unreplicated(self, delivery: Delivery, delta: Vector, returned: TakenBack) -> list[int]:
        """Add the shards that this node owns without a backup or learner; returns the other shards."""
        bounds, feedback = self._store.bounds, self._feedback
        with_residual = feedback.residual_shards
        corrects = with_residual | returned.shards
        results: dict[int, PushResult] = {}
        for shards in self._runs if self._deltas.unreplicated(range(len(bounds))) else []:
            if not self._deltas.unreplicated(shards):
                continue
            values = delta[bounds[shards[0]][0] : bounds[shards[-1]][1]]
            await self._context.turns.take(values.size)
            # One check of all values where the whole run is added here; otherwise each shard is checked by itself.
            is_whole = len(self._deltas.unreplicated(shards)) == len(shards)
            is_finite = is_whole and await self._is_in_range(values)
            own = self._deltas.unreplicated(shards)  # may have changed meanwhile
            plain = ((shard, delta[slice(*bounds[shard])]) for shard in own if shard not in corrects)
            results |= self._deltas.add_unreplicated(delivery.push, plain, is_finite=is_finite)
            if corrects:
                corrected = (
                    (shard, self._corrected(shard, delta[slice(*bounds[shard])], returned))
                    for shard in own
                    if shard in corrects
                )
                results |= self._deltas.add_unreplicated(delivery.push, corrected, is_finite=False)
        for result in results.values():
            self._outbox.count(delivery, result)
        for shard in with_residual & results.keys():
            feedback.clear_residual(shard)
        return [shard for shard in range(len(bounds)) if shard not in results]

    async def _is_in_range(self, values: Vector) -> bool:
        """In a thread only for more than a pass of the loop takes: two wake-ups cost more than to read the others."""
        if values.size > VALUES_PER_PASS:
            return await self._executor.run(is_delta_in_range, values)
        return is_delta_in_range(values)

    def _corrected(self, shard: int, values: Vector, returned: TakenBack) -> Vector:
        """The values of a shard that is added without loss: with its residual, and with what was taken back."""
        if shard in self._feedback.residual_shards:
            values = values + self._feedback.residual(shard)
        return values + returned.of(shard) if shard in returned else values

    async def _encode_all(
        self, shards: list[int], delta: Vector, returned: TakenBack, *, borrows: bool
    ) -> list[Outgoing]:
        encode = partial(self._encode, delta, shards, returned, borrows=borrows)
        if self._context.codec.codec == "float32" and borrows and not returned:
            return encode()  # neither computes nor copies
        return await self._executor.run(encode)

    async def _deliver(self, delivery: Delivery) -> None:
        """Deliver what is encoded; returns when every shard has its answer, or when nothing moves."""
        assert delivery.wait is not None
        done = asyncio.ensure_future(delivery.done.wait())
        try:
            is_done = await delivery.wait.until(done, lambda: delivery.unacknowledged)
        finally:
            delivery.wait = None
            done.cancel()
        if not is_done:
            if delivery.unacknowledged:  # the others were taken back
                self._log.warning("push_unfinished", step=delivery.push.step, shards=len(delivery.unacknowledged))
            await self._outbox.detach(delivery)

    def _encode(self, delta: Vector, shards: list[int], returned: TakenBack, *, borrows: bool) -> list[Outgoing]:
        codec = self._context.codec.codec
        if self.apart_since is not None and is_plain(codec):
            codec = "bfloat16"  # what a sparse delta lacks fades from step to step, and this one may wait for hours
        pauses = ThreadPauses(self._executor, 1 if is_plain(codec) else LIGHT_TURNS)
        outgoing = []
        for shard in shards:
            start, stop = self._store.bounds[shard]
            values = delta[start:stop]
            if shard in returned:
                values = values + returned.of(shard)
            is_borrowed = codec == "float32" and borrows and shard not in returned
            if codec != "float32":
                encoded = self._feedback.encode(shard, values, codec, is_last=self._is_last)
                pauses.after(stop - start)
            else:
                encoded = codecs.as_bytes(values if is_borrowed else values.copy())
            outgoing.append(Outgoing(shard, encoded, codec, stop - start, is_borrowed))
        return outgoing


def _runs(bounds: Sequence[tuple[int, int]]) -> list[range]:
    """Consecutive shards in runs of about `VALUES_PER_TURN` values each."""
    runs = []
    first = values = 0
    for shard, (start, stop) in enumerate(bounds):
        values += stop - start
        if values >= VALUES_PER_TURN or shard == len(bounds) - 1:
            runs.append(range(first, shard + 1))
            first, values = shard + 1, 0
    return runs
