"""The response body of a relay that has received a bundle of pushes: streams the results of each as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from training.exchange.aggregation.bundles import Carried, Results, piece_of
from training.exchange.aggregation.consignments import Note
from training.exchange.messages import Push, PushResult

#: An answer without results sends an empty piece so often, so that the sender does not time out.
KEEP_ALIVE_INTERVAL_S = 0.25


class Deliver(Protocol):
    """Delivers some shards of a delta; see `DeltaRelays.deliver`."""

    async def __call__(self, push: Push, items: list[Carried], note: Note, hops: int) -> None: ...


class ResultsStream:
    """An asynchronous iterator of encoded results. `begin` adds a push whose results it waits for; closing it cancels
    the deliveries that are still under way. `on_end` is called then, or after the last result."""

    def __init__(self, deliver: Deliver, on_end: Callable[[ResultsStream], object]) -> None:
        self._deliver_one = deliver
        self._on_end = on_end
        #: Encoded bytes of pushes that are kept in memory until they are delivered.
        self.size_bytes = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._fresh: list[Results] = []
        self._is_fresh = asyncio.Event()

    def begin(self, place: int, push: Push, items: list[Carried], hops: int) -> None:
        """Deliver the push at this place of the bundle, over at most so many further hops."""
        task = asyncio.create_task(self._deliver(place, push, items, hops), name=f"relayed-{push.step}")
        task.add_done_callback(lambda _task: self._is_fresh.set())
        self._tasks.append(task)

    async def _deliver(self, place: int, push: Push, items: list[Carried], hops: int) -> None:
        def note(results: list[PushResult]) -> None:
            if results:
                self._fresh.append((place, results))
                self._is_fresh.set()

        await self._deliver_one(push, items, note, hops)

    def __aiter__(self) -> ResultsStream:
        return self

    async def __anext__(self) -> bytes:
        while True:
            if not self._fresh and not all(task.done() for task in self._tasks):
                self._is_fresh.clear()
                try:
                    async with asyncio.timeout(KEEP_ALIVE_INTERVAL_S):
                        await self._is_fresh.wait()
                except TimeoutError:
                    return piece_of([])
            if self._fresh:
                fresh, self._fresh = self._fresh, []
                return piece_of(fresh)
            if all(task.done() for task in self._tasks):
                await self.aclose()
                raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel the deliveries without a result; deltas that owners have added stay added. Raises the first error of a
        delivery."""
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        self._on_end(self)
        for error in ended:
            if isinstance(error, Exception):
                raise error
