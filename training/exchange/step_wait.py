"""How long a step waits for its shards: as long as something moves; and what is in the way of those that do not come.

A step waits for many shards from several nodes at once. The wait is over when for its limit no byte of any transfer has
moved, and no answer has come. So a line that is slow but moves ends no wait, and a node that sends nothing holds no
step longer than the limit after the others are done.

Bytes that were lost with a failed request and are sent again are no progress until there are more than before.
Otherwise a stopped process, whose kernel takes a few bytes of each attempt, would hold the step for as long as it is
stopped.

`Obstacles` tells `/status` who was asked last, and why that was in vain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from p2pnode.overlay.peers import Contact
from p2pnode.overlay.waits import Silence


class StepWait:
    """What one step waits for. `limit_s` None: without limit. Its times are those of the event loop, as its timers'."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        #: What has moved: bytes, and one for each answer.
        self._moved = 0
        #: The transfers in progress, and the most bytes of each that have moved over all attempts.
        self._transfers: dict[int, tuple[Hashable, Callable[[], int]]] = {}
        self._most_bytes: dict[Hashable, int] = {}
        self._count = 0

    def note(self) -> None:
        """Something was answered."""
        self._moved += 1

    @contextmanager
    def watching(self, key: Hashable, moved_bytes: Callable[[], int]) -> Iterator[None]:
        """While the block runs, more bytes of this transfer than in any earlier one with the same key are movement."""
        self._count += 1
        number = self._count
        self._transfers[number] = key, moved_bytes
        try:
            yield
        finally:
            self._look(*self._transfers.pop(number))

    def _look(self, key: Hashable, moved_bytes: Callable[[], int]) -> None:
        before = self._most_bytes.get(key, 0)
        if (moved := moved_bytes()) > before:
            self._most_bytes[key] = moved
            self._moved += moved - before

    async def until(self, done: asyncio.Future[Any]) -> bool:
        """Wait for `done`, which is neither cancelled nor asked for its result; False if it was silent for too long
        before."""
        if self._limit_s is None:
            await asyncio.wait([done])
            return True
        now = asyncio.get_running_loop().time
        silence = Silence(self._limit_s, now(), self._moved)
        while not done.done():
            for transfer in list(self._transfers.values()):
                self._look(*transfer)
            if not (left_s := silence.look(now(), self._moved)):
                return False
            await asyncio.wait([done], timeout=left_s)
        return True


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
