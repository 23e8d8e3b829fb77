"""Pushes this node's deltas: encodes them and delivers them to the owners of their shards; one alone adds them at once.

A push returns when every shard has its answer, or when nothing of those that have none has moved for the deadline
(under bsp there is none). Shards without an answer stay in the outbox, which continues in the background. A refusal is
final and counted.

What a codec leaves out, and what was never sent, stays progress of the trainer: the delta is overwritten with what goes
to the owners (`Trainer.encoded`), and shards that were not sent in time are returned. So nothing is dropped for its
age.

While no owner is in reach the node trains on by itself (`OwnerDirectory.is_apart`): every delta is returned, and one is
kept, however long that lasts. An owner adds it as one from the other side of a split, with the weight that a delta had
before.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from p2pnode.overlay.environment import Environment
from p2pnode.training.cooperative import LoopTurns, ThreadPauses, light
from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.codec_choice import CodecChoice
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.encoding.table import CODECS, LEAST_LOSSY, CodecName
from p2pnode.training.exchange.client.outbox import Outbox
from p2pnode.training.exchange.delta import Delivery, Outgoing, PushReport
from p2pnode.training.exchange.directory import OwnerDirectory
from p2pnode.training.exchange.messages import Push
from p2pnode.training.exchange.owner.deltas import DeltaHandler
from p2pnode.training.exchange.run_state import RunState, SwarmView
from p2pnode.training.exchange.store.shard_store import ShardStore
from p2pnode.training.exchange.timeouts import StepWait
from p2pnode.training.settings import ExchangeSettings
from p2pnode.training.shards.delta_range import is_delta_in_range

#: A step waits for acknowledgements until nothing has moved for this long; the rest stays in the outbox. A dead owner
#: is replaced about then, and a longer wait would hold the trainer up.
PUSH_DEADLINE_S = 5.0


@dataclass(eq=False)
class PushClient:
    """Pushes the deltas of one node."""

    settings: ExchangeSettings
    store: ShardStore
    view: SwarmView
    run: RunState
    codec: CodecChoice
    turns: LoopTurns
    outbox: Outbox
    directory: OwnerDirectory
    deltas: DeltaHandler
    environment: Environment

    def __post_init__(self) -> None:
        self._executor = self.environment.executor
        self._log = self.environment.log
        #: Since when no owner is in reach (monotonic seconds) and the step that was trained then; None: one is.
        self.apart_since: tuple[float, int] | None = None
        #: Those that were counted when an owner was in reach.
        self._workers = 1.0
        #: Whether the delta that is pushed next has steps that were trained while no owner was in reach.
        self._was_apart = False
        #: How many deltas' worth of training the last one left out; None: it left out next to nothing.
        self.held_back: float | None = None

    async def push(
        self,
        step: int,
        base_step: int,
        weight: float,
        delta: Vector,
        *,
        on_encoded: Callable[[], None] = lambda: None,
        is_last: bool = False,
    ) -> PushReport:
        """Send the delta of a step, `float32[total]`; returns when every shard has its answer, or at the deadline.

        `delta` must not change before that. It is overwritten with what is sent of it: `on_encoded` is called then,
        once. The last delta of a run leaves little out.
        """
        self._note_apart()
        sent_before, is_apart = self.run.counters.bytes_sent, self.apart_since is not None
        workers = max(1.0, self.view.worker_count())
        if is_apart or self._was_apart:
            if self.settings.weight != "sum":
                weight *= workers / max(workers, self._workers)  # those that are out of reach train on, too
            # Promise 7 (docs/faults.md): later steps would be added to it.
            if not await self._executor.run(is_delta_in_range, delta):
                delta[:] = 0.0
                on_encoded()
                return PushReport(refused={"not_finite": len(self.store)}, refused_shards=set(range(len(self.store))))
        else:
            self._workers = workers
        self._was_apart = is_apart or self._was_apart
        # Promise 5: what is trained while no owner is in reach is added when one is.
        if is_apart and not is_last:
            self.outbox.note_apart()
            on_encoded()
            return PushReport(returned=tuple(range(len(self.store))))
        push = Push(
            node=self.store.node_id,
            incarnation=self.run.incarnation,
            step=step,
            base_step=base_step,
            weight=weight,
            shards=[],
            workers=max(workers, self._workers),
            apart=self._was_apart,
        )
        self._was_apart = False
        delivery = Delivery(push, {}, asyncio.Event())
        rest = await self._add_alone(delivery, delta)
        if rest:
            encoded = await self._encode_all(rest, delta, is_apart=push.apart, is_last=is_last)
            delivery.unacknowledged = {item.shard: item for item in encoded}
        on_encoded()
        report = delivery.report
        report.returned = await self._deliver(delivery, waits=not is_apart) if rest else ()
        report.outstanding = len(delivery.unacknowledged)
        report.bytes_sent = self.run.counters.bytes_sent - sent_before
        return report

    def _note_apart(self) -> None:
        """Whether the step that was just trained can be sent to nobody."""
        is_apart = not self.store.synchronous and self.directory.is_apart()
        now_s, step = self.environment.clock.monotonic(), self.run.step
        if is_apart and self.apart_since is None:
            self.apart_since = now_s, step
            self._log.warning("owners_out_of_reach", step=step)
        elif not is_apart and self.apart_since is not None:
            (since_s, since), self.apart_since = self.apart_since, None
            self._log.info("owners_in_reach", steps=step - since, seconds=round(now_s - since_s, 1))

    async def _add_alone(self, delivery: Delivery, delta: Vector) -> list[int]:
        """Add all that this node owns, if it is alone; returns the other shards."""
        rest = dict.fromkeys(range(len(self.store)))
        for shard in list(rest) if self.deltas.is_alone else ():
            start, stop = self.store.bounds[shard]
            await self.turns.take(stop - start)
            if (result := self.deltas.add_alone(delivery.push, shard, delta[start:stop])) is not None:
                self.outbox.note_answer(delivery, result)
                del rest[shard]
        return list(rest)

    async def _encode_all(self, shards: list[int], delta: Vector, *, is_apart: bool, is_last: bool) -> list[Outgoing]:
        codec = self.codec.codec
        if is_apart and CODECS[codec].is_partial:
            codec = LEAST_LOSSY  # it may have been trained for hours, and be the only one that comes through
        if codec == "float32":
            bounds = ((shard, *self.store.bounds[shard]) for shard in shards)
            return [
                Outgoing(shard, codecs.as_bytes(delta[start:stop]), codec, stop - start, is_borrowed=True)
                for shard, start, stop in bounds
            ]
        return await self._executor.run(self._encode, delta, shards, codec, is_last)

    async def _deliver(self, delivery: Delivery, *, waits: bool) -> tuple[int, ...]:
        """Deliver what is encoded, until every shard has its answer, or nothing moves; returns the shards of which no
        byte was sent, and none will be. Where it does not wait, all of them stay in the outbox."""
        # Promise 3: no step waits for a silent owner longer than this.
        wait = delivery.wait = StepWait(None if self.store.synchronous else PUSH_DEADLINE_S)
        self.outbox.add(delivery)
        done = asyncio.ensure_future(delivery.done.wait())
        try:
            if waits and await wait.until(done):
                return ()
        finally:
            delivery.wait = None
            done.cancel()
        returned: tuple[int, ...] = ()
        if waits:
            if delivery.unacknowledged:
                self._log.warning("push_unfinished", step=delivery.push.step, shards=len(delivery.unacknowledged))
            # Promise 10: what the line did not carry in time is trained on, and not refused as late.
            returned = self.outbox.give_back(delivery)
        await self.outbox.detach(delivery)
        return returned

    def _encode(self, delta: Vector, shards: list[int], codec: CodecName, is_last: bool) -> list[Outgoing]:
        """Encode these shards, and leave in `delta` what the owners will decode."""
        outgoing, is_partial = [], CODECS[codec].is_partial
        pauses = ThreadPauses(self._executor)
        whole = left_out = 0.0
        for shard in shards:
            start, stop = self.store.bounds[shard]
            values = delta[start:stop]
            rest = np.zeros_like(values)
            whole += float(np.dot(values, values)) if is_partial else 0.0
            encoded = codecs.encode_with_feedback(values, rest, codec, is_last=is_last)
            left_out += float(np.dot(rest, rest)) if is_partial else 0.0
            values -= rest
            # Kernels encode 390,000 values in 0.5 ms as sparse, in 0.2 ms otherwise.
            pauses.after(stop - start if is_partial else light(stop - start))
            outgoing.append(Outgoing(shard, encoded, codec, stop - start))
        self.held_back = deltas_held_back(math.sqrt(left_out), math.sqrt(whole)) if is_partial else None
        return outgoing


def deltas_held_back(left_out: float, whole: float) -> float:
    """Of a node whose delta, of length `whole`, leaves out a part of length `left_out`: how many deltas' worth of
    training that is. In a steady state each delta is what the one before left out, and as much again as one adds."""
    return left_out / max(whole - left_out, 1e-3 * whole) if whole > 0.0 else 0.0
