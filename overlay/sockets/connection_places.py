"""Decides which accepted connections a node keeps while it has fewer places than it is asked for. Pure.

A process may open so many descriptors and no more. If connections took all of them, the node could neither write a
checkpoint nor connect to an owner. So accepted connections share a part of them (`places_of`), and a new one takes the
place of one that does nothing: first of those that have never brought a request, of the host with the most of them the
oldest; then of those that wait for their next one. A connection whose request is being served keeps its place. So
members, who send a request as soon as they are connected, are served while others fill the port.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

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
