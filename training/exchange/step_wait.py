"""Waits for the transfers of one step until they are done, or all that is awaited has been silent for too long, or
comes from owners that have put this node off for too long.

`training.exchange.patience` and `training.exchange.wait_credit` decide. Here are the transfers to look at, and the
timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from training.exchange.patience import Patience
from training.exchange.wait_credit import OwnerWait

#: Looks at the bytes of the transfers per limit.
LOOKS = 10

#: A transfer in progress: its key, the shards that it carries, and its bytes so far.
Transfer = tuple[Hashable, Collection[int], Callable[[], int]]


class StepWait:
    """What one step waits for. `limit_s` None: without limit. `owners`: from whom; None: from whomever, as long as it
    takes. Its times are those of the event loop, as its timers'."""

    def __init__(self, limit_s: float | None, owners: OwnerWait | None = None) -> None:
        self._now = asyncio.get_running_loop().time
        self._owners = None if limit_s is None else owners
        self._patience = None if limit_s is None else Patience(limit_s, self._now())
        self._transfers: dict[int, Transfer] = {}
        self._count = 0
        #: Done when an owner has put something off: then the next look is not as far away any more.
        self._news: asyncio.Future[None] | None = None

    def note(self, shards: Collection[int]) -> None:
        """Something of these shards has arrived, or was answered."""
        if self._patience is not None:
            self._patience.note(shards, self._now())

    def put_off(self, shards: Collection[int]) -> None:
        """An owner has said that these shards are to be asked for again."""
        if self._owners is not None and shards:
            self._owners.put_off(shards)
            if self._news is not None and not self._news.done():
                self._news.set_result(None)

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
        owners = self._owners
        while not done.done():
            left_s = patience.left_s(awaited(), self._now())
            if not left_s:
                if owners is not None:
                    owners.ended_silent(awaited(), patience.limit_s, self._now())
                return False
            if owners is not None and owners.is_over(awaited(), self._now()):
                return False
            # No further than one look: what moves now makes the limit later.
            look_s = patience.limit_s / LOOKS if owners is None else min(patience.limit_s / LOOKS, owners.look_s)
            if self._news is None or self._news.done():
                self._news = asyncio.get_running_loop().create_future()
            await asyncio.wait([done, self._news], timeout=min(left_s, look_s), return_when=asyncio.FIRST_COMPLETED)
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
