"""Takes a push in: its shards are validated, forwarded and added in parts, while the next ones still arrive.

At most `PARTS_AT_ONCE` parts are being added, beside the one that is being received; then nothing more is read, and the
origin waits. So the memory of a push is bounded, and the line to the origin and that to the backup are used at once. A
part that fills slowly is closed after `PART_S`: behind a slow line the backup gets the first shards while the last are
far away.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from p2pnode.training.cooperative import VALUES_PER_PART
from p2pnode.training.encoding.frames import BadFrame
from p2pnode.training.exchange.messages import SIGN_OF_LIFE, Push, PushResult, piece_of
from p2pnode.training.exchange.owner.delta_item import IncomingDelta

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
