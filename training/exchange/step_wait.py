"""How long a step waits for its shards: as long as one of them moves; and what is in the way of those that do not come.

A step waits for many shards from several nodes at once. Each shard has its own silence: it begins with the wait, and
anew whenever a byte of the transfer that carries the shard has moved, or an answer for one of them has come. The wait
is over when every shard that is still awaited has been silent for the limit. So a dead node does not hold the step
longer than the limit, however long the others take; and a line that is slow but moves ends no wait.

Bytes that were lost with a failed request and are sent again are no progress until there are more than before.
Otherwise a stopped process, whose kernel takes a few bytes of each attempt, would hold the step for as long as it is
stopped. Nor is it movement where fewer than `LEAST_BYTES_PER_S` come: no line is that slow.

`Patience` decides; `StepWait` has the transfers to look at, and the timer. `Obstacles` tells `/status` who was asked
last, and why that was in vain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from overlay.peers import Contact

#: A hundredth of the slowest capacity class. A member that sends a byte a second does so to hold others up.
LEAST_BYTES_PER_S = 80.0


class Patience:
    """The silence of each shard that one step waits for. Times are monotonic seconds."""

    def __init__(self, limit_s: float, now_s: float) -> None:
        self.limit_s = limit_s
        self._began_s = now_s
        self._moved_s: dict[int, float] = {}
        #: Most bytes of a transfer that have moved so far, over all attempts.
        self._most_bytes: dict[Hashable, int] = {}

    def note(self, shards: Iterable[int], now_s: float) -> None:
        """Something of these shards has arrived, or was answered."""
        for shard in shards:
            self._moved_s[shard] = now_s

    def note_bytes(self, transfer: Hashable, shards: Iterable[int], moved_bytes: int, now_s: float) -> None:
        """So many bytes of a transfer that carries these shards have moved in its present attempt."""
        shards = list(shards)
        last_s = max((self._moved_s.get(shard, self._began_s) for shard in shards), default=now_s)
        if moved_bytes > self._most_bytes.get(transfer, 0) + LEAST_BYTES_PER_S * (now_s - last_s):
            self._most_bytes[transfer] = moved_bytes
            self.note(shards, now_s)

    def left_s(self, awaited: Iterable[int], now_s: float) -> float:
        """Seconds until every awaited shard has been silent for the limit, if nothing moves; 0: the wait is over."""
        last_s = max((self._moved_s.get(shard, self._began_s) for shard in awaited), default=self._began_s)
        left_s = last_s + self.limit_s - now_s
        # Less is not worth another timer, and too little for one to move the clock.
        return left_s if left_s > self.limit_s / 1000 else 0.0


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


class Obstacle(NamedTuple):
    """Since when requests for a shard were in vain, in monotonic seconds; the owner that was asked last, None where
    none is known; and why."""

    since_s: float
    owner: Contact | None
    reason: str


class Obstacles:
    """Of the shards for which one node asks."""

    def __init__(self) -> None:
        self._found: dict[int, Obstacle] = {}

    def note(self, shards: Iterable[int], owner: Contact | None, reason: str, asked_s: float) -> None:
        """A request for these shards, made at this moment, was in vain."""
        for shard in shards:
            former = self._found.get(shard)
            self._found[shard] = Obstacle(asked_s if former is None else former.since_s, owner, reason)

    def clear(self, shard: int) -> None:
        """It has come, or was taken."""
        self._found.pop(shard, None)

    def __contains__(self, shard: int) -> bool:
        return shard in self._found

    def since(self, before_s: float) -> dict[Obstacle, int]:
        """What has been in the way since then or longer, by owner and reason, with the number of shards; the longest
        first. `since_s` is that of the shard that has waited longest."""
        found: dict[tuple[bytes, str], tuple[Obstacle, int]] = {}
        for one in sorted(self._found.values(), key=lambda one: one.since_s):
            if one.since_s <= before_s:
                key = b"" if one.owner is None else one.owner.node_id, one.reason
                longest, count = found.get(key, (one, 0))
                found[key] = longest, count + 1
        return dict(found.values())
