"""Ends waits that take too long. All are of one length, so one timer serves them all."""

from __future__ import annotations

import asyncio
from typing import Any


class Deadlines:
    """A wait that has no result after `seconds` raises `TimeoutError`. `asyncio.timeout` costs each small call a timer
    and five calls more."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        #: What waits, and until when; the oldest first.
        self._waiting: dict[asyncio.Future[Any], float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, wait: asyncio.Future[Any]) -> None:
        """This has so much time from now on; `end` follows."""
        loop = wait.get_loop()
        at_s = self._waiting[wait] = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_at(at_s, self._on_time)

    def end(self, wait: asyncio.Future[Any]) -> None:
        """It waits no more."""
        self._waiting.pop(wait, None)

    def _on_time(self) -> None:
        self._timer = None
        while self._waiting:
            wait, at_s = next(iter(self._waiting.items()))
            loop = wait.get_loop()
            if at_s > loop.time():
                self._timer = loop.call_at(at_s, self._on_time)
                return
            del self._waiting[wait]
            if not wait.done():
                wait.set_exception(TimeoutError())
                wait.exception()  # who waits may have been cancelled at the same moment

    def stop(self) -> None:
        """End nothing any more."""
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
