"""One direction of a simulated line: a rate, shared in turn by all streams that use it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

#: What a line carries at once for one stream, as TCP would in a few segments.
PIECE_BYTES = 16 * 1024


class Line:
    """Carries pieces of many streams at `rate` bytes per second, one piece of each in turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop, rate: float) -> None:
        self.rate = rate
        #: Bytes carried so far, and seconds spent on them.
        self.carried_bytes = 0
        self.busy_s = 0.0
        self._loop = loop
        self._waiting: dict[Any, deque[tuple[int, Callable[[], None]]]] = {}
        self._is_busy = False

    def carry(self, stream: Any, size_bytes: int, arrived: Callable[[], None]) -> None:
        """Call `arrived` when the line has carried so many bytes, after all that this stream has sent before."""
        self._waiting.setdefault(stream, deque()).append((size_bytes, arrived))
        if not self._is_busy:
            self._next()

    def drop(self, stream: Any) -> None:
        """Its end was closed: what waits is not sent any more."""
        self._waiting.pop(stream, None)

    def _next(self) -> None:
        stream = next(iter(self._waiting))
        pieces = self._waiting.pop(stream)
        size_bytes, arrived = pieces.popleft()
        if pieces:
            self._waiting[stream] = pieces
        self._is_busy = True
        self.carried_bytes += size_bytes
        self.busy_s += size_bytes / self.rate
        self._loop.call_later(size_bytes / self.rate, self._carried, arrived)

    def _carried(self, arrived: Callable[[], None]) -> None:
        self._is_busy = False
        arrived()
        if self._waiting and not self._is_busy:
            self._next()
