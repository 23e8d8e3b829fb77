"""The node's events: a numbered ring buffer that the HTTP API reads, and the log that fills it.

Numbers count up from 1 and are never reused within one start. A reader asks for events above the last number it saw;
events that left the ring unread are counted as dropped. The ring belongs to the event loop's thread and is not kept on
disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from p2pnode.overlay.environment import Clock, Log

Level = Literal["debug", "info", "warning", "error"]

#: Events kept: at one event per step and peer change, some minutes of a busy node.
CAPACITY = 2000
#: Longest text kept of one field, in characters.
MAX_FIELD_CHARACTERS = 2000
#: Events that reach the log at most once per `THROTTLE_S` as `info`; the others are logged as `debug`.
THROTTLED = frozenset({"evaluated"})
THROTTLE_S = 5.0


class Event(msgspec.Struct, frozen=True):
    """One event. `time` is wall time in seconds since 1970; `fields` are plain JSON values."""

    id: int
    time: float
    level: Level
    event: str
    fields: dict[str, Any]


class Page(NamedTuple):
    """Events above the requested number. `dropped` of them had left the ring before they were read. `last` is the
    newest number in the ring, also if the limit cut the page short."""

    events: list[Event]
    dropped: int
    last: int


class EventRing:
    """Keeps the last `capacity` events."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._ring: deque[Event] = deque(maxlen=capacity)
        self._last = 0

    @property
    def last(self) -> int:
        """Number of the newest event; 0 before the first."""
        return self._last

    def add(self, level: Level, event: str, fields: Mapping[str, Any], *, wall: float) -> Event:
        """Append an event with plain fields."""
        self._last += 1
        entry = Event(self._last, wall, level, event, {key: plain(value) for key, value in fields.items()})
        self._ring.append(entry)
        return entry

    def since(self, number: int, limit: int = CAPACITY) -> Page:
        """The oldest `limit` events with a number above `number`.

        A number above the newest comes from an earlier start of the node and yields everything.
        """
        if number > self._last:
            number = 0
        oldest = self._last - len(self._ring) + 1
        dropped = max(0, oldest - 1 - number)
        skip = max(0, number + 1 - oldest)
        events = [event for position, event in enumerate(self._ring) if skip <= position < skip + limit]
        return Page(events, dropped, self._last)


def plain(value: Any) -> Any:
    """A value for JSON: bytes in hexadecimal, addresses and other objects as text, long texts cut."""
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
            # Named tuples such as Address have a text form of their own.
            return plain(str(value))


class EventLog:
    """The node's log: each event goes to the writer and, from `info` up, into the ring.

    Debug events stay out of the ring, because one per datagram would displace everything else. Evaluations are all in
    the ring, but the log shows one every few seconds, because fast steps would fill a terminal with them.
    """

    def __init__(self, ring: EventRing, writer: Log, clock: Clock) -> None:
        self._ring = ring
        self._writer = writer
        self._clock = clock
        self._written: dict[str, float] = {}

    def debug(self, event: str, **fields: Any) -> None:
        self._writer.debug(event, **{key: plain(value) for key, value in fields.items()})

    def info(self, event: str, **fields: Any) -> None:
        entry = self._ring.add("info", event, fields, wall=self._clock.wall())
        write = self._writer.debug if self._is_throttled(event) else self._writer.info
        write(event, **entry.fields)

    def warning(self, event: str, **fields: Any) -> None:
        entry = self._ring.add("warning", event, fields, wall=self._clock.wall())
        self._writer.warning(event, **entry.fields)

    def error(self, event: str, **fields: Any) -> None:
        entry = self._ring.add("error", event, fields, wall=self._clock.wall())
        self._writer.error(event, **entry.fields)

    def _is_throttled(self, event: str) -> bool:
        """Whether the log has shown this throttled event a moment ago."""
        if event not in THROTTLED:
            return False
        now = self._clock.monotonic()
        written = self._written.get(event)
        if written is not None and now - written < THROTTLE_S:
            return True
        self._written[event] = now
        return False
