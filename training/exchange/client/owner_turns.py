"""One delivery is sent to an owner at a time, in the order in which they ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class OwnerTurns:
    """The turns of all owners that something is sent to."""

    def __init__(self) -> None:
        #: The lock of each, and how many hold it or wait for it.
        self._owners: dict[bytes, tuple[asyncio.Lock, list[None]]] = {}

    @asynccontextmanager
    async def of(self, owner: bytes) -> AsyncIterator[None]:
        """Wait for the turn with this owner; it lasts as long as the block."""
        lock, users = self._owners.setdefault(owner, (asyncio.Lock(), []))
        users.append(None)
        try:
            async with lock:
                yield
        finally:
            users.pop()
            if not users:
                self._owners.pop(owner, None)
