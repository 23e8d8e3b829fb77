"""The node's events: a numbered ring that the HTTP API reads, and the log door that fills it.

Numbers rise by one from 1 and are never used twice within a start, so that a reader who asks for what is newer than
the last one it saw misses nothing silently: what fell out of the ring is counted. The ring belongs to the event loop's
thread. It keeps no events on disk.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from overlay.environment import Clock

Level = Literal["debug", "info", "warning", "error"]

#: Events kept: at one event per step and peer change, some minutes of a busy node.
CAPACITY = 2000
#: Longest text kept of one field, in characters: an event is a line, not a report.
MAX_FIELD_CHARACTERS = 2000
#: Events of which the log gets one in so many seconds; the others go there as `debug`.
THINNED = frozenset({"evaluated"})
THINNED_S = 5.0


class Event(msgspec.Struct, frozen=True):
    """Something changed. `time` is wall time in seconds since 1970; `fields` are plain JSON values."""

    id: int
    time: float
    level: Level
    event: str
    fields: dict[str, Any]


class Page(NamedTuple):
    """Events newer than the number asked for. `dropped` of them had left the ring before they could be read;
    `last` is the newest number there is, also where the page was cut short by its limit."""

    events: list[Event]
    dropped: int
    last: int


class EventRing:
    """The last `capacity` events."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._ring: deque[Event] = deque(maxlen=capacity)
        self._last = 0
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def last(self) -> int:
        """Number of the newest event; 0 before the first."""
        return self._last

    def add(self, level: Level, event: str, fields: Mapping[str, Any], *, wall: float) -> Event:
        """Append an event, its fields made plain, and wake those who wait for it."""
        self._last += 1
        entry = Event(self._last, wall, level, event, {key: plain(value) for key, value in fields.items()})
        self._ring.append(entry)
        self.wake()
        return entry

    def since(self, number: int, limit: int = CAPACITY) -> Page:
        """The oldest `limit` events with a number above `number`.

        A number from a former start of the node, above our newest, yields everything: the reader begins anew.
        """
        if number > self._last:
            number = 0
        oldest = self._last - len(self._ring) + 1
        dropped = max(0, oldest - 1 - number)
        skip = max(0, number + 1 - oldest)
        events = [event for position, event in enumerate(self._ring) if skip <= position < skip + limit]
        return Page(events, dropped, self._last)

    async def wait_newer(self, number: int, timeout_s: float) -> bool:
        """Wait until there is an event above `number`. False after `timeout_s` seconds or a `wake` without one."""
        if number != self._last:
            return True
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
        except TimeoutError:
            return False
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        return self._last > number

    def wake(self) -> None:
        """Let every waiter return now: there is news, or the node is closing."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def plain(value: Any) -> Any:
    """A value as JSON has it: bytes in hexadecimal, addresses and other objects as their text, long texts cut."""
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            return value if len(value) <= MAX_FIELD_CHARACTERS else value[:MAX_FIELD_CHARACTERS] + "…"
        case bytes() | bytearray() | memoryview():
            return bytes(value).hex()
        case dict():
            return {str(key): plain(entry) for key, entry in value.items()}
        case list() | tuple() if type(value) in (list, tuple):
            return [plain(entry) for entry in value]
        case _:
            # Named tuples such as Address know how they are written.
            return plain(str(value))


class Writer(Protocol):
    """Where log lines go; structlog's bound logger is one."""

    def debug(self, event: str, **fields: Any) -> Any: ...

    def info(self, event: str, **fields: Any) -> Any: ...

    def warning(self, event: str, **fields: Any) -> Any: ...

    def error(self, event: str, **fields: Any) -> Any: ...


class EventLog:
    """The log door: each event goes to the writer and, from `info` up, into the ring.

    Debug events stay out of the ring: at one per datagram they would push everything else out of it. Evaluations are
    all in the ring, and one every few seconds in the log: fast steps would fill a terminal with nothing else.
    """

    def __init__(self, ring: EventRing, writer: Writer, clock: Clock) -> None:
        self._ring = ring
        self._writer = writer
        self._clock = clock
        self._written: dict[str, float] = {}

    def debug(self, event: str, **fields: Any) -> None:
        self._writer.debug(event, **{key: plain(value) for key, value in fields.items()})

    def info(self, event: str, **fields: Any) -> None:
        entry = self._ring.add("info", event, fields, wall=self._clock.wall())
        write = self._writer.debug if self._is_routine(event) else self._writer.info
        write(event, **entry.fields)

    def warning(self, event: str, **fields: Any) -> None:
        entry = self._ring.add("warning", event, fields, wall=self._clock.wall())
        self._writer.warning(event, **entry.fields)

    def error(self, event: str, **fields: Any) -> None:
        entry = self._ring.add("error", event, fields, wall=self._clock.wall())
        self._writer.error(event, **entry.fields)

    def _is_routine(self, event: str) -> bool:
        """Whether the log said the like a moment ago."""
        if event not in THINNED:
            return False
        now = self._clock.monotonic()
        written = self._written.get(event)
        if written is not None and now - written < THINNED_S:
            return True
        self._written[event] = now
        return False
