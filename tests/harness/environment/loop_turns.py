"""Counts how often other tasks run while something works: what takes long has to yield to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class LoopTurns:
    """`count`: turns of the loop so far in which another task ran."""

    def __init__(self) -> None:
        self.count = 0

    async def run(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)


@contextmanager
def counted_turns() -> Iterator[LoopTurns]:
    """Count turns of the running loop within the block."""
    turns = LoopTurns()
    counting = asyncio.create_task(turns.run())
    try:
        yield turns
    finally:
        counting.cancel()
