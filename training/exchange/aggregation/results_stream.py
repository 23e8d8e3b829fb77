"""The answer to a bundle: the results of each push as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from training.exchange.aggregation.bundles import Carried, Results, piece_of
from training.exchange.aggregation.consignments import Note
from training.exchange.messages import Push, PushResult

#: An answer says so often that it is at work.
SIGN_INTERVAL_S = 0.25


class Deliver(Protocol):
    """Delivers some shards of a delta; see `DeltaRelays.deliver`."""

    async def __call__(self, push: Push, items: list[Carried], note: Note, hops: int) -> None: ...


class ResultsStream:
    """The body of an answer: the results of each push as they come. Closing it ends what is under way."""

    def __init__(self, deliver: Deliver, on_end: Callable[[ResultsStream], object]) -> None:
        self._deliver_one = deliver
        self._on_end = on_end
        #: Encoded bytes that are held for it.
        self.size_bytes = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._fresh: list[Results] = []
        self._is_fresh = asyncio.Event()

    def begin(self, place: int, push: Push, items: list[Carried], hops: int) -> None:
        """Deliver one push of the bundle."""
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
                    async with asyncio.timeout(SIGN_INTERVAL_S):
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
        """End what has no answer yet; what was added stays. Raises what delivering raised."""
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        self._on_end(self)
        for error in ended:
            if isinstance(error, Exception):
                raise error
