"""Whose turn it is: requests handled at once, in all and of one party, and large heads read at once.

A member that opens as many streams as it can, or reads its answers drop by drop, waits for its own turns and not the
others for theirs. Who a party is the caller says: a proven node id, or an address where there is no proof.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from overlay.errors import OverlayError
from overlay.rate_limits import ConcurrencyLimit

#: Requests handled at once; more wait their turn, their senders' patience bounds the queue.
HANDLERS_AT_ONCE = 256
#: Of one party: half, so that two could not keep a third out for long.
HANDLERS_OF_ONE = 128
#: Requests of one party that wait for its turns; an owner forwards as many at once as others push to it.
WAITING_OF_ONE = 1024
#: Heads longer than a list of every shard needs: whole histories of states. Each may take 16 MiB.
LARGE_HEAD_BYTES = 1 << 20
LARGE_HEADS_AT_ONCE = 8
LARGE_HEADS_OF_ONE = 2


class TooManyRequests(OverlayError):
    """A party has more under way than it may; the text says what."""


class HandlerLimiter:
    """Gives turns to parties; the empty party (the loopback of an open swarm) has no share of its own."""

    def __init__(self) -> None:
        self._all = asyncio.Semaphore(HANDLERS_AT_ONCE)
        self._own: dict[bytes | str, asyncio.Semaphore] = {}
        self._here: ConcurrencyLimit[bytes | str] = ConcurrencyLimit(HANDLERS_OF_ONE + WAITING_OF_ONE)
        self._large = asyncio.Semaphore(LARGE_HEADS_AT_ONCE)
        self._large_heads: ConcurrencyLimit[bytes | str] = ConcurrencyLimit(LARGE_HEADS_OF_ONE)

    @asynccontextmanager
    async def of(self, party: bytes | str) -> AsyncIterator[None]:
        """Wait for a turn, and hold it. Raises `TooManyRequests` when too many of this party wait already."""
        if not party:
            async with self._all:
                yield
            return
        if not self._here.enter(party):
            raise TooManyRequests(f"more than {HANDLERS_OF_ONE + WAITING_OF_ONE} requests of yours are open here")
        own = self._own.setdefault(party, asyncio.Semaphore(HANDLERS_OF_ONE))
        try:
            async with own, self._all:
                yield
        finally:
            self._here.leave(party)
            if not self._here.count(party):
                del self._own[party]

    @asynccontextmanager
    async def large_head(self, party: bytes | str) -> AsyncIterator[None]:
        """Wait for the turn to read a large head. Raises `TooManyRequests`."""
        if not self._large_heads.enter(party):
            raise TooManyRequests(f"more than {LARGE_HEADS_OF_ONE} large heads of yours are on their way")
        try:
            async with self._large:
                yield
        finally:
            self._large_heads.leave(party)
