"""Takes a push in: its shards are validated, forwarded and added in parts, while the next ones still arrive.

At most `PARTS_AT_ONCE` parts are being added, beside the one that is being received; then nothing more is read, and the
origin waits. So the memory of a push is bounded, and the line to the origin and that to the backup are used at once. A
part that fills slowly is closed after `PART_S`: behind a slow line the backup gets the first shards while the last are
far away.

What has become final is given out as it comes (`next_results`), for the stream of `training.exchange.messages`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from training.cooperative import VALUES_PER_PART
from training.encoding.frames import BadFrame
from training.exchange.messages import SIGN_OF_LIFE, Push, PushResult, piece_of
from training.exchange.owner.delta_item import IncomingDelta

PARTS_AT_ONCE = 2
PART_S = 0.1
#: An answer that takes longer begins, for an origin that reads it as a stream; then nothing is silent for longer.
KEEP_ALIVE_INTERVAL_S = 0.25

Accept = Callable[[Push, list[IncomingDelta]], Awaitable[list[PushResult]]]


class PushIntake:
    """One push on its way in. `read` receives the next shard, `accept` adds some, `refuse` is for a malformed one.

    `close` must be called, however the push ends.
    """

    def __init__(
        self,
        push: Push,
        read: Callable[[int], Awaitable[IncomingDelta]],
        accept: Accept,
        refuse: Callable[[int, BadFrame], PushResult],
        has_targets: Callable[[int], bool],
    ) -> None:
        self._push = push
        self._read = read
        self._accept = accept
        self._refuse = refuse
        self._has_targets = has_targets
        self._now = asyncio.get_running_loop().time
        self._results: dict[int, PushResult] = {}
        self._fresh: list[PushResult] = []
        self._is_fresh = asyncio.Event()
        self._parts: dict[asyncio.Task[None], None] = {}
        self._task = asyncio.create_task(self._run(), name=f"push-{push.step}")
        self._task.add_done_callback(lambda _task: self._is_fresh.set())

    def on_end(self, call: Callable[[PushIntake], object]) -> None:
        """Call it when the work has ended, in whatever way."""
        self._task.add_done_callback(lambda _task: call(self))

    async def results(self, within_s: float | None) -> list[PushResult] | None:
        """All results, in the order of the push; None if that takes longer. Raises what reading or adding raised."""
        await asyncio.wait([self._task], timeout=within_s)
        if not self._task.done():
            return None
        self._task.result()
        return [self._results[shard] for shard in self._push.shards]

    async def next_results(self, within_s: float) -> list[PushResult] | None:
        """The results since the last call, or none after `within_s`; None when all have been given out."""
        if not self._fresh and not self._task.done():
            try:
                async with asyncio.timeout(within_s):
                    await self._is_fresh.wait()
            except TimeoutError:
                return []
        if self._task.done():
            if self._task.cancelled():
                return None  # closed: the origin sends again what has no answer
            self._task.result()
            if not self._fresh:
                return None
        fresh, self._fresh = self._fresh, []
        self._is_fresh.clear()
        if self._task.done():
            self._is_fresh.set()
        return fresh

    async def close(self) -> None:
        """End the work, if it is not done; what was added stays."""
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
        items: list[IncomingDelta] = []
        began_s = 0.0
        for number, shard in enumerate(self._push.shards):
            try:
                item = await self._read(shard)
            except BadFrame as error:
                for rest in self._push.shards[number:]:
                    self._note([self._refuse(rest, error)])
                break
            if not self._has_targets(shard):
                # At once, while it is in the processor's cache and the next one is still being received.
                self._note(await self._accept(self._push, [item]))
                continue
            began_s = began_s if items else self._now()
            items.append(item)
            values = sum(one.delta.size for one in items)
            is_due = self._now() - began_s >= PART_S and len(self._parts) < PARTS_AT_ONCE
            if values >= VALUES_PER_PART // (PARTS_AT_ONCE + 1) or is_due:
                await self._begin_part(items)
                items = []
        if items:
            await self._begin_part(items)
        while self._parts:
            await self._end_part()

    async def _begin_part(self, items: list[IncomingDelta]) -> None:
        while len(self._parts) >= PARTS_AT_ONCE:
            await self._end_part()
        self._parts[asyncio.create_task(self._add(items), name="push-part")] = None

    async def _end_part(self) -> None:
        done, _ = await asyncio.wait(self._parts, return_when=asyncio.FIRST_COMPLETED)
        for part in [part for part in self._parts if part in done]:
            del self._parts[part]
            part.result()

    async def _add(self, items: list[IncomingDelta]) -> None:
        self._note(await self._accept(self._push, items))

    def _note(self, results: list[PushResult]) -> None:
        self._results |= {result.shard: result for result in results}
        self._fresh += results
        self._is_fresh.set()


class ResultStream:
    """The body of a streamed answer. It ends the push when it is closed, whether or not it was read."""

    def __init__(self, intake: PushIntake) -> None:
        self._intake = intake

    def __aiter__(self) -> ResultStream:
        return self

    async def __anext__(self) -> bytes:
        results = await self._intake.next_results(KEEP_ALIVE_INTERVAL_S)
        if results is None:
            raise StopAsyncIteration
        return piece_of(results) if results else SIGN_OF_LIFE

    async def aclose(self) -> None:
        await self._intake.close()
