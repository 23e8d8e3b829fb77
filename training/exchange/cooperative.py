"""Long work on the event loop, cut so that other tasks run in between."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

#: Values decoded, added or copied before the loop gets a turn.
VALUES_PER_TURN = 1 << 18


@dataclass(slots=True)
class LoopYielder:
    """Work on many values, cut so that the loop has a turn after each half a millisecond or so of it."""

    done: int = 0

    async def after(self, values: int) -> None:
        """So many values have just been worked on. What was looked at before may have changed when this returns."""
        self.done += values
        if self.done >= VALUES_PER_TURN:
            self.done = 0
            await asyncio.sleep(0)
