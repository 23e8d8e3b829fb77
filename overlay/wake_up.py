"""A signal that one task waits for: `asyncio.Event` without its queue of waiters, which takes 0.8 KB."""

from __future__ import annotations

import asyncio


class WakeUp:
    """Set until it is cleared. One task may wait at a time."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake the task that waits, or the next one that would."""
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        """The next wait lasts until the next `set`."""
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    async def wait(self) -> None:
        """Wait until it is set. Raises `RuntimeError` if another task waits already."""
        if self._is_set:
            return
        if self._waiter is not None:
            raise RuntimeError("another task waits for this signal")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
