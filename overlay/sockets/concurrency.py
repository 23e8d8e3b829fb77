"""Limits what a port does at once: the requests that are handled, and the accepted connections that are kept.

Requests are limited in total and per peer. Without the limit per peer, one member that opens many streams, or reads its
responses slowly, could block all others. The caller names the peer: a proven node id, or an address group if there is
no proof.

A process may open so many descriptors and no more. If connections took all of them, the node could neither write a
checkpoint nor connect to an owner. So accepted connections share a part of them (`places_of`), and a new one takes the
place of one that does nothing: first of those that have never brought a request, of the host with the most of them the
oldest; then of those that wait for their next one. A connection whose request is being served keeps its place. So
members, who send a request as soon as they are connected, are served while others fill the port.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

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


#: Descriptors for files, the trainer, the status page, the event loop and the interpreter itself.
RESERVED_DESCRIPTORS = 64
#: Of the others the connections that a node accepts have half; it needs as many for those that it makes.
ACCEPTED_SHARE = 0.5
MIN_PLACES = 16
#: A sealed swarm's gate holds connections without a ticket for seconds: they have a quarter of the places.
UNPROVEN_SHARE = 0.25

Key = TypeVar("Key", bound=Hashable)


def places_of(descriptors: int) -> int:
    """How many accepted connections a process may have that may open so many descriptors."""
    return max(MIN_PLACES, int(ACCEPTED_SHARE * (descriptors - RESERVED_DESCRIPTORS)))


class ConnectionPlaces(Generic[Key]):
    """The places, and who has them."""

    def __init__(self, places: int) -> None:
        self._places = places
        #: Connections that have never brought a request, those that wait for the next, and those being served; each
        #: with its host, the oldest first.
        self._silent: dict[Key, str] = {}
        self._waiting: dict[Key, str] = {}
        self._busy: dict[Key, str] = {}

    def __len__(self) -> int:
        return len(self._silent) + len(self._waiting) + len(self._busy)

    def enter(self, key: Key, host: str) -> Key | None:
        """A connection was accepted; returns the one to be closed for it, if there must be one: itself, if all others
        are being served. That one has no place any more: many may be accepted before the first is closed."""
        self._silent[key] = host
        if len(self) <= self._places:
            return None
        others = {one: its for one, its in self._silent.items() if one != key}
        idle = others or self._waiting
        closed = _of_busiest_host(idle) if idle else key
        self.leave(closed)
        return closed

    def begin(self, key: Key) -> None:
        """Its request is being served."""
        for where in (self._silent, self._waiting):
            if (host := where.pop(key, None)) is not None:
                self._busy[key] = host

    def end(self, key: Key) -> None:
        """Its request has been answered."""
        if (host := self._busy.pop(key, None)) is not None:
            self._waiting[key] = host

    def leave(self, key: Key) -> None:
        """It is closed."""
        for where in (self._silent, self._waiting, self._busy):
            where.pop(key, None)


def _of_busiest_host(connections: dict[Key, str]) -> Key:
    busiest = Counter(connections.values()).most_common(1)[0][0]
    return next(key for key, host in connections.items() if host == busiest)
