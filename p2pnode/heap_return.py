"""Gives the pages of free heap back to the kernel while a node is at rest, that is between its exchanges.

What a step encodes, receives and decodes is freed at its end. It lies between memory that stays, such as the repair
log, so glibc keeps its pages: two to five bytes per parameter, which the trainer could use. `malloc_trim` returns them,
and the next step faults them in again. Both together take `SECONDS_PER_BYTE` of processor time. So they are returned
only so often that this stays below `SHARE` of one core: after every step where steps take long, seldom where they are
short. The allocator is locked meanwhile, 60 ms per GB, which is another reason not to do it often.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from overlay.environment import Clock, Executor, Log
from p2pnode.own_memory import OwnMemory

LOOK_S = 0.5
#: Less is not worth it: the allocator keeps as much at the top of the heap anyway (`p2pnode.malloc.KEPT_BYTES`).
LEAST_BYTES = 64 << 20
#: Processor time to return a byte and to fault it in again: 0.06 and 0.5 s per GB, measured with pages of 4 KiB on the
#: machine of docs/figures.md.
SECONDS_PER_BYTE = 0.6e-9
#: Of one core.
SHARE = 0.01
#: Two looks this close to each other are of a node at rest.
AT_REST = 0.05


def is_return_due(free_bytes: int, former_bytes: int, since_s: float) -> bool:
    """Whether to return free heap now: there is enough of it, it is as it was at the look before, and the last time is
    long enough ago. `since_s`: infinite before the first. Pure."""
    is_at_rest = abs(free_bytes - former_bytes) <= AT_REST * former_bytes
    return free_bytes >= LEAST_BYTES and is_at_rest and since_s * SHARE >= free_bytes * SECONDS_PER_BYTE


class HeapReturn:
    """Returns free heap until cancelled. `give_back` blocks, and runs in a thread."""

    def __init__(
        self,
        clock: Clock,
        executor: Executor,
        log: Log,
        own_memory: Callable[[], OwnMemory | None],
        give_back: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._executor = executor
        self._log = log
        self._own_memory = own_memory
        self._give_back = give_back

    async def run(self) -> None:
        """Ends at once where the system does not tell how much memory is free in the heap."""
        #: What was still counted as free right after the last time: it cannot be returned, or is no heap.
        kept_bytes = former_bytes = 0
        last_s = float("-inf")
        while (own := self._own_memory()) is not None:
            free_bytes = max(0, own.free_heap_bytes - kept_bytes)
            if is_return_due(free_bytes, former_bytes, self._clock.monotonic() - last_s):
                await self._executor.run(self._give_back)
                last_s = self._clock.monotonic()
                after = self._own_memory() or own
                kept_bytes, free_bytes = after.free_heap_bytes, 0
                self._log.debug("heap_returned", returned_bytes=own.private_bytes - after.private_bytes)
            former_bytes = free_bytes
            await asyncio.sleep(LOOK_S)
