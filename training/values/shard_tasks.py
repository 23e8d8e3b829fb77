"""Tasks that work for shards: one at a time for each shard, begun once per turn of the event loop, ended together.

What comes in one turn of the loop is begun together, so that many small pieces of work become few. A second request to
a receiver, beside the first, costs both ends as much as the first, and takes what would have gone together. On a quick
line the first has its answer before much has come. On a slow line, or behind one that waits for something else, the
next begins after a moment.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Hashable, Sequence
from functools import partial

from p2pnode.overlay.environment import Environment

#: Requests under way to one receiver. The next begins when the one before has its answer, or after this.
AT_ONCE, STAGGER_S = 3, 0.01
#: The shards of work that had a fault rest so long: it would have the same fault at once.
FAULT_PAUSE_S = 1.0

#: Called when its task starts, so that one cancelled earlier leaves nothing behind.
Work = Callable[[], Awaitable[None]]


class ShardTasks(ABC):
    """The base of what works for shards. A shard is *busy* with the task that was started for it last, until that has
    ended. `begin` starts what is due now, with `start`, and leaves busy shards out."""

    def __init__(self, name: str, environment: Environment) -> None:
        """`name`: of the tasks."""
        self.busy: dict[int, asyncio.Task[None]] = {}
        self._name = name
        self._environment = environment
        self._is_woken = False
        self._is_halted = False
        self._tasks: dict[asyncio.Task[None], None] = {}
        #: When each request under way to a receiver began, in order.
        self._began_s: dict[Hashable, list[float]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @abstractmethod
    def begin(self) -> None:
        """Start what is due."""

    def wake(self) -> None:
        """Begin what is due, after all that comes in this turn of the event loop."""
        if not (self._is_woken or self._is_halted):
            self._is_woken = True
            asyncio.get_running_loop().call_soon(self._on_turn)

    def _on_turn(self) -> None:
        self._is_woken = False
        if not self._is_halted:
            self.begin()

    def _on_timer(self) -> None:
        self._timer = None
        self.wake()

    def start(self, shards: Sequence[int], work: Work, receiver: Hashable = None) -> None:
        """Work for these shards. Does nothing while too much is under way to the receiver, if one is named: what is
        due begins later."""
        now_s = self._environment.clock.monotonic()
        if receiver is not None:
            began_s = self._began_s.setdefault(receiver, [])
            wait_s = began_s[-1] + STAGGER_S - now_s if began_s else 0.0
            if len(began_s) >= AT_ONCE:
                return  # the end of one begins what is due
            if wait_s > 0.0:
                if self._timer is None:
                    self._timer = asyncio.get_running_loop().call_later(wait_s, self._on_timer)
                return
            began_s.append(now_s)
        task = asyncio.get_running_loop().create_task(self._work(shards, work, receiver, now_s), name=self._name)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        self.busy |= dict.fromkeys(shards, task)

    async def _work(self, shards: Sequence[int], work: Work, receiver: Hashable, now_s: float) -> None:
        task = asyncio.current_task()
        try:
            await work()
        except Exception as error:
            self._environment.log.error("exchange_service_failed", service=self._name, error=repr(error))
            resting = [shard for shard in shards if self.busy.get(shard) is task]
            self.start(resting, partial(asyncio.sleep, FAULT_PAUSE_S))
        finally:
            if receiver is not None:
                self._began_s[receiver].remove(now_s)
                if not self._began_s[receiver]:
                    del self._began_s[receiver]
            for shard in shards:
                if self.busy.get(shard) is task:
                    del self.busy[shard]
            self.wake()

    def halt(self) -> None:
        """Cancel every task; nothing begins any more. What had no answer is sent again by its origin."""
        self._is_halted = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        """`halt`, and wait until all have ended."""
        self.halt()
        await asyncio.gather(*self._tasks, return_exceptions=True)
