"""Waits for the transfers of one step until they are done, or all that is awaited has been silent for too long.

`training.exchange.patience` decides. Here are the transfers to look at, and the timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from training.exchange.patience import Patience

#: Looks at the bytes of the transfers per limit.
LOOKS = 10

#: A transfer in progress: its key, the shards that it carries, and its bytes so far.
Transfer = tuple[Hashable, Collection[int], Callable[[], int]]


class StepWait:
    """What one step waits for. `limit_s` None: without limit. Its times are those of the event loop, as its timers'."""

    def __init__(self, limit_s: float | None) -> None:
        self._now = asyncio.get_running_loop().time
        self._patience = None if limit_s is None else Patience(limit_s, self._now())
        self._transfers: dict[int, Transfer] = {}
        self._count = 0

    def note(self, shards: Collection[int]) -> None:
        """Something of these shards has arrived, or was answered."""
        if self._patience is not None:
            self._patience.note(shards, self._now())

    @contextmanager
    def watching(self, key: Hashable, shards: Collection[int], moved_bytes: Callable[[], int]) -> Iterator[None]:
        """While the block runs, more bytes of this transfer than in any earlier one with the same key are movement of
        the shards; `shards` may shrink meanwhile."""
        self._count += 1
        number = self._count
        self._transfers[number] = key, shards, moved_bytes
        try:
            yield
        finally:
            self._look(*self._transfers.pop(number))

    async def until(self, done: asyncio.Future[Any], awaited: Callable[[], Collection[int]]) -> bool:
        """Wait for `done`, which is neither cancelled nor asked for its result; False if the awaited shards were
        silent for too long before."""
        patience = self._patience
        if patience is None:
            await asyncio.wait([done])
            return True
        while not done.done():
            left_s = patience.left_s(awaited(), self._now())
            if not left_s:
                return False
            # No further than one look: what moves now makes the limit later.
            await asyncio.wait([done], timeout=min(left_s, patience.limit_s / LOOKS))
            for transfer in list(self._transfers.values()):
                self._look(*transfer)
        return True

    def _look(self, key: Hashable, shards: Collection[int], moved_bytes: Callable[[], int]) -> None:
        if self._patience is not None:
            self._patience.note_bytes(key, list(shards), moved_bytes(), self._now())


async def together(works: Iterable[Awaitable[None]]) -> None:
    """Run all of these until they are done; if one raises, the others are cancelled before its error goes on."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
