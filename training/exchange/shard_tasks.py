"""Tasks that work for shards: one at a time for each shard, begun once per turn of the event loop, ended together.

What comes in one turn of the loop is begun together, so that many small pieces of work become few. A shard is *busy*
from `start` until `free`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from math import inf

from overlay.environment import Log

#: The shards of work that had a fault rest so long: it would have the same fault at once.
FAULT_PAUSE_S = 1.0

#: Called when its task starts, so that one cancelled earlier leaves nothing behind.
Work = Callable[[], Awaitable[None]]


class ShardTasks(ABC):
    """The base of what works for shards. `begin` starts what is due now, with `start`, and leaves busy shards out."""

    def __init__(self, name: str, log: Log) -> None:
        """`name`: of the tasks."""
        self.busy: dict[int, None] = {}
        self._name = name
        self._faults = log
        self._is_woken = False
        self._is_halted = False
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    @property
    def is_halted(self) -> bool:
        """Whether nothing begins any more."""
        return self._is_halted

    def wake(self) -> None:
        """Begin what is due, after all that comes in this turn of the event loop."""
        if not (self._is_woken or self._is_halted):
            self._is_woken = True
            asyncio.get_running_loop().call_soon(self._on_turn)

    def wake_after(self, seconds: float) -> None:
        """Begin what is due then; nothing for an infinite time."""
        loop = asyncio.get_running_loop()
        at_s = loop.time() + seconds
        if at_s == inf or self._is_halted:
            return
        if self._timer is not None:
            if self._due_s <= at_s:
                return
            self._timer.cancel()
        # Not `TimerHandle.when`: for a moment that has come uvloop gives a handle without it.
        self._due_s = at_s
        self._timer = loop.call_at(at_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.wake()

    def _on_turn(self) -> None:
        self._is_woken = False
        if not self._is_halted:
            self.begin()

    @abstractmethod
    def begin(self) -> None:
        """Start what is due."""

    def start(self, shards: Iterable[int], work: Work) -> None:
        """Work for these shards, which are busy until `free`."""
        theirs = dict.fromkeys(shards)
        self.busy |= theirs
        task = asyncio.get_running_loop().create_task(self._guarded(theirs, work), name=self._name)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def _guarded(self, shards: dict[int, None], work: Work) -> None:
        """Log a fault of the work. Its shards rest, but for those that something else works for already."""
        try:
            await work()
        except Exception as error:
            self._faults.error("exchange_service_failed", service=self._name, error=repr(error))
            resting = [shard for shard in shards if shard not in self.busy]
            self.busy |= dict.fromkeys(resting)
            await asyncio.sleep(FAULT_PAUSE_S)
            self.free(resting)

    def free(self, shards: Iterable[int]) -> None:
        """Nothing works for these shards any more; begin what is due."""
        for shard in shards:
            self.busy.pop(shard, None)
        self.wake()

    def halt(self) -> None:
        """Cancel every task; nothing begins any more. What had no answer is sent again by who sent it."""
        self._is_halted = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        """`halt`, and wait until all have ended."""
        self.halt()
        await asyncio.gather(*self._tasks, return_exceptions=True)
