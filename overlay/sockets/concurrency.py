"""Limits how many requests are handled at once, in total and per peer.

Without the limit per peer, one member that opens many streams, or reads its responses slowly, could block all others.
The caller names the peer: a proven node id, or an address group if there is no proof.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

#: Requests handled at once. Others wait; the places for connections and the timeouts of their senders bound the queue.
MAX_CONCURRENT_HANDLERS = 256
#: The share of these places, and of those of a peer, for handlers that may wait for an answer of another node. The rest
#: is for requests that wait for nobody, and end: two owners that are full of pushes, each of which waits for the other
#: to take a delta as the backup, would wait for ever.
WAITING_SHARE = 0.75
#: Half of them, so that one peer cannot block the others.
MAX_HANDLERS_PER_PEER = 128


class _Places:
    """Places for handlers, of which those that wait for other nodes may take `WAITING_SHARE`."""

    __slots__ = ("_all", "_waiting", "open")

    def __init__(self, count: int) -> None:
        #: How many handlers have a place, or wait for one.
        self.open = 0
        self._all = asyncio.Semaphore(count)
        self._waiting = asyncio.Semaphore(max(1, int(WAITING_SHARE * count)))

    def wanted(self, *, waits: bool) -> list[asyncio.Semaphore]:
        """Where a handler needs a place, in this order."""
        return [self._waiting, self._all] if waits else [self._all]


class _Occupied:
    """The places of one handler. A class, because nested generators cost a small request as much again."""

    __slots__ = ("_limiter", "_peer", "_seats", "_taken")

    def __init__(self, limiter: HandlerLimiter, peer: bytes | str, seats: list[asyncio.Semaphore]) -> None:
        self._limiter = limiter
        self._peer = peer
        self._seats = seats
        self._taken = 0

    async def __aenter__(self) -> None:
        try:
            for seats in self._seats:
                await seats.acquire()
                self._taken += 1
        except BaseException:
            self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        for seats in self._seats[: self._taken]:
            seats.release()
        if self._peer:
            self._limiter.left(self._peer)


class HandlerLimiter:
    """Holds the limits. An empty peer (the loopback of an open swarm) has no limit of its own."""

    def __init__(self) -> None:
        self._all = _Places(MAX_CONCURRENT_HANDLERS)
        self._own: dict[bytes | str, _Places] = {}

    def handler(self, peer: bytes | str, *, waits: bool = False) -> AbstractAsyncContextManager[object]:
        """Wait until a handler may run, and occupy its place. `waits`: it may wait for an answer of another node."""
        seats = self._all.wanted(waits=waits)
        if not peer:
            return _Occupied(self, peer, seats)
        own = self._own.get(peer)
        if own is None:
            own = self._own[peer] = _Places(MAX_HANDLERS_PER_PEER)
        own.open += 1
        return _Occupied(self, peer, own.wanted(waits=waits) + seats)

    def left(self, peer: bytes | str) -> None:
        """A request of a peer has ended."""
        own = self._own[peer]
        own.open -= 1
        if not own.open:
            del self._own[peer]
