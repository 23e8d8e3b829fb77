"""Limits how many requests are handled at once, in total and per peer, and how many large heads are read at once.

Without the limit per peer, one member that opens many streams, or reads its responses slowly, could block all others.
The caller names the peer: a proven node id, or an address group if there is no proof.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from overlay.errors import OverlayError
from overlay.rate_limits import ConcurrencyLimit

#: Requests handled at once. Others wait; the timeouts of their senders bound the queue.
MAX_CONCURRENT_HANDLERS = 256
#: The share of these places, and of those of a peer, for handlers that may wait for an answer of another node. The rest
#: is for requests that wait for nobody, and end: two owners that are full of pushes, each of which waits for the other
#: to take a delta as the backup, would wait for ever.
WAITING_SHARE = 0.75
#: Half of them, so that one peer cannot block the others.
MAX_HANDLERS_PER_PEER = 128
#: Waiting requests of one peer. An owner forwards as many at once as others push to it.
MAX_WAITING_PER_PEER = 1024
#: Longer heads contain histories of states rather than a list of shards; each may take 16 MiB.
LARGE_HEAD_BYTES = 1 << 20
MAX_CONCURRENT_LARGE_HEADS = 8
MAX_LARGE_HEADS_PER_PEER = 2


class TooManyRequests(OverlayError):
    """A peer exceeds a limit; the text names it."""


class _Places:
    """Places for handlers, of which those that wait for other nodes may take `WAITING_SHARE`."""

    def __init__(self, count: int) -> None:
        self._all = asyncio.Semaphore(count)
        self._waiting = asyncio.Semaphore(max(1, int(WAITING_SHARE * count)))

    def taken(self, *, waits: bool) -> AbstractAsyncContextManager[None]:
        """Wait for a place, and occupy it."""
        return self._taken_by_one_that_waits() if waits else self._all

    @asynccontextmanager
    async def _taken_by_one_that_waits(self) -> AsyncIterator[None]:
        async with self._waiting, self._all:
            yield


class HandlerLimiter:
    """Holds the limits. An empty peer (the loopback of an open swarm) has no limit of its own."""

    def __init__(self) -> None:
        self._all = _Places(MAX_CONCURRENT_HANDLERS)
        self._own: dict[bytes | str, _Places] = {}
        self._open: ConcurrencyLimit[bytes | str] = ConcurrencyLimit(MAX_HANDLERS_PER_PEER + MAX_WAITING_PER_PEER)
        self._large = asyncio.Semaphore(MAX_CONCURRENT_LARGE_HEADS)
        self._large_heads: ConcurrencyLimit[bytes | str] = ConcurrencyLimit(MAX_LARGE_HEADS_PER_PEER)

    def handler(self, peer: bytes | str, *, waits: bool = False) -> AbstractAsyncContextManager[object]:
        """Wait until a handler may run, and occupy its place. `waits`: it may wait for an answer of another node.
        Raises `TooManyRequests` if too many of the peer wait."""
        return self._handler_of(peer, waits=waits) if peer else self._all.taken(waits=waits)

    @asynccontextmanager
    async def _handler_of(self, peer: bytes | str, *, waits: bool) -> AsyncIterator[None]:
        if not self._open.enter(peer):
            raise TooManyRequests(
                f"more than {MAX_HANDLERS_PER_PEER + MAX_WAITING_PER_PEER} requests of yours are open here"
            )
        own = self._own.setdefault(peer, _Places(MAX_HANDLERS_PER_PEER))
        try:
            async with own.taken(waits=waits), self._all.taken(waits=waits):
                yield
        finally:
            self._open.leave(peer)
            if not self._open.count(peer):
                del self._own[peer]

    @asynccontextmanager
    async def large_head(self, peer: bytes | str) -> AsyncIterator[None]:
        """Wait until a large head may be read, and occupy its place. Raises `TooManyRequests`."""
        if not self._large_heads.enter(peer):
            raise TooManyRequests(f"more than {MAX_LARGE_HEADS_PER_PEER} large heads of yours are on their way")
        try:
            async with self._large:
                yield
        finally:
            self._large_heads.leave(peer)
