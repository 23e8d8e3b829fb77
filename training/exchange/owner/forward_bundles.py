"""Forwards deltas to backups: in a large swarm all that wait for one backup go in one request.

An owner forwards each delta when it has come. Of a thousand nodes that makes a few thousand small requests per step.
Where deltas are relayed (`exchange.relay_above`) at most `REQUESTS_AT_ONCE` are under way to one backup, and what comes
meanwhile waits and goes together. Each forward is as it would be alone, and has an answer of its own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from overlay.peers import Contact
from overlay.transport import Buffer, TransportError
from training.encoding.frames import sized
from training.exchange.context import ExchangeContext
from training.exchange.messages import MAX_FORWARDS, Forward, ForwardAnswer, Forwards, ForwardsAnswer

#: Requests under way to one backup, and the bytes of one.
REQUESTS_AT_ONCE = 2
#: The first delta waits for others for this share of the median step, and not longer than this.
GATHER_SHARE, GATHER_MOST_S = 0.01, 0.1
MAX_BYTES = 16 * 1024 * 1024


@dataclass(slots=True, eq=False)
class _Waiting:
    """One forward: its message and the frames that follow."""

    message: Forward
    frames: Iterator[Buffer]
    framed_bytes: int
    answer: asyncio.Future[ForwardAnswer]


@dataclass(slots=True)
class _Line:
    """What waits for one backup."""

    waiting: deque[_Waiting] = field(default_factory=deque)
    busy: int = 0
    gathers: bool = False

    def take(self) -> list[_Waiting]:
        """The oldest ones that still wait, as many as one request has room for."""
        taken: list[_Waiting] = []
        size = 0
        while self.waiting and len(taken) < MAX_FORWARDS:
            if self.waiting[0].answer.done():
                self.waiting.popleft()
                continue
            size += self.waiting[0].framed_bytes
            if taken and size > MAX_BYTES:
                break
            taken.append(self.waiting.popleft())
        return taken


class ForwardBundles:
    """The forwards of one owner."""

    def __init__(self, context: ExchangeContext) -> None:
        self._context = context
        self._rpc = context.rpc
        self._lines: dict[bytes, _Line] = {}
        #: Backups of an earlier version: they are sent one at a time.
        self._single: dict[bytes, None] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._is_halted = False

    @property
    def is_on(self) -> bool:
        """Whether this swarm is so large that deltas are relayed."""
        above = self._context.settings.relay_above
        return bool(above) and self._context.view.worker_count() > above

    async def send(self, to: Contact, message: Forward, frames: Iterator[Buffer], framed_bytes: int) -> ForwardAnswer:
        """Send one forward, alone or with others. Raises `TransportError`."""
        if not self.is_on or to.node_id in self._single:
            return await self._alone(to, message, frames, framed_bytes)
        line = self._lines.setdefault(to.node_id, _Line())
        one = _Waiting(message, frames, framed_bytes, asyncio.get_running_loop().create_future())
        line.waiting.append(one)
        self._begin(to, line)
        return await one.answer

    async def halt(self) -> None:
        """Send nothing more: what has no answer fails."""
        self._is_halted = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, to: Contact, line: _Line) -> None:
        """Send what waits, as far as requests are free. A task sends it, for whoever waits may be cancelled."""
        if self._is_halted:
            return
        if line.waiting and not line.gathers and line.busy < REQUESTS_AT_ONCE:
            line.gathers = True
            task = asyncio.create_task(self._empty(to, line), name="forwards")
            self._tasks[task] = None
            task.add_done_callback(self._tasks.pop)
        elif not line.busy and not line.gathers:
            self._lines.pop(to.node_id, None)

    async def _empty(self, to: Contact, line: _Line) -> None:
        """Let a little more come, and send it; then what has come meanwhile."""
        try:
            await asyncio.sleep(min(GATHER_SHARE * self._context.view.median_step_seconds(), GATHER_MOST_S))
            batch = line.take()
        finally:
            line.gathers = False
        line.busy += 1
        self._begin(to, line)
        if batch:
            await self._answer(to, batch)
        line.busy -= 1
        self._begin(to, line)

    async def _answer(self, to: Contact, batch: list[_Waiting]) -> None:
        """Send a batch, and give each its answer, or the error."""
        failure = TransportError("closed", to.address, "was not sent a delta")
        try:
            for one, answer in zip(batch, await self._request(to, batch), strict=True):
                if not one.answer.done():
                    one.answer.set_result(answer)
        except TransportError as error:
            failure = error
        finally:
            for one in batch:
                if not one.answer.done():
                    one.answer.set_exception(TransportError(failure.kind, failure.address, failure.detail))

    async def _request(self, to: Contact, batch: list[_Waiting]) -> list[ForwardAnswer]:
        if len(batch) == 1:
            return [await self._alone(to, batch[0].message, batch[0].frames, batch[0].framed_bytes)]
        message = Forwards(self._context.genesis, [one.message for one in batch])
        body = sized(chain.from_iterable(one.frames for one in batch), sum(one.framed_bytes for one in batch))
        try:
            async with self._rpc.request("forwards", to, message, body) as answer:
                answers = (await self._rpc.decoded(to, answer.head, ForwardsAnswer)).answers
        except TransportError as error:
            if error.is_not_served:
                self._single[to.node_id] = None
            raise
        if len(answers) != len(batch):
            raise TransportError("foreign", to.address, f"gave {len(answers)} answers to {len(batch)} forwards")
        return answers

    async def _alone(self, to: Contact, message: Forward, frames: Iterator[Buffer], framed_bytes: int) -> ForwardAnswer:
        async with self._rpc.request("forward", to, message, sized(frames, framed_bytes)) as answer:
            return await self._rpc.decoded(to, answer.head, ForwardAnswer)
