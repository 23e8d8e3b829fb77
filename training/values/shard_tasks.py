"""Tasks that work for shards: one at a time for each shard, begun once per turn of the event loop, ended together.

What comes in one turn of the loop is begun together, so that many small pieces of work become few. A shard is *busy*
from `start` until `free`.

`Staggered` tells when the next of several requests to one receiver may begin. A second one beside the first costs both
ends as much as the first, and takes what would have gone together. On a quick line the first has its answer before much
has come. On a slow line, or behind one that waits for something else, the next begins after a moment.

`OwnerPump` sends what waits for shards to their owners in this way. A shard that was not answered rests for a moment,
while the directory looks for its owner.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Hashable, Iterable
from functools import partial
from math import inf

from overlay.environment import Log
from overlay.peers import Contact
from overlay.transport import TransportError
from training.exchange.context import ExchangeContext
from training.exchange.directory import OwnerDirectory

#: The next begins when the one before has its answer, or after this.
STAGGER_S = 0.01


class Staggered:
    """What is under way to each receiver, at most `most` at once."""

    def __init__(self, most: int, stagger_s: float = STAGGER_S) -> None:
        self._most = most
        self._stagger_s = stagger_s
        #: When each of them began, in order.
        self._began_s: dict[Hashable, list[float]] = {}

    def wait_s(self, receiver: Hashable, now_s: float) -> float:
        """Seconds until the next may begin; infinite: when one of those under way has ended."""
        began_s = self._began_s.get(receiver)
        if not began_s:
            return 0.0
        return inf if len(began_s) >= self._most else max(0.0, began_s[-1] + self._stagger_s - now_s)

    def begin(self, receiver: Hashable, now_s: float) -> float:
        """One begins; `end` follows, with what this returns."""
        self._began_s.setdefault(receiver, []).append(now_s)
        return now_s

    def end(self, receiver: Hashable, began_s: float) -> None:
        """The one that began then has ended."""
        under_way = self._began_s[receiver]
        under_way.remove(began_s)
        if not under_way:
            del self._began_s[receiver]


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


#: Requests under way to one owner.
REQUESTS_AT_ONCE = 3
FIRST_RETRY_S, MAX_RETRY_S = 0.02, 0.5

#: Sends what waits for these shards of one owner, and returns those that are to be sent again after a rest. Raises
#: `TransportError`.
Send = Callable[[Contact, list[int]], Awaitable[list[int]]]


class OwnerPump(ShardTasks):
    """`waiting` gives the shards for which something waits; `send` is called for those of one owner."""

    def __init__(
        self, context: ExchangeContext, directory: OwnerDirectory, waiting: Callable[[], Iterable[int]], send: Send
    ) -> None:
        super().__init__("owner-request", context.environment.log)
        self._context = context
        self._directory = directory
        self._waiting = waiting
        self._send = send
        self._clock = context.environment.clock
        self._requests = Staggered(REQUESTS_AT_ONCE)
        #: How long each shard that was not answered rests next time.
        self._pauses: dict[int, float] = {}

    def begin(self) -> None:
        shards = [shard for shard in self._waiting() if shard not in self.busy]
        if not shards:
            return
        groups, unknown = self._directory.by_owner(shards)
        now_s = self._clock.monotonic()
        for owner, theirs in groups:
            if wait_s := self._requests.wait_s(owner.node_id, now_s):
                self.wake_after(wait_s)
            else:
                self.start(theirs, partial(self._request, owner, theirs))
        if unknown:
            self.start(unknown, partial(self._rest, unknown))

    async def _request(self, owner: Contact, shards: list[int]) -> None:
        began_s = self._requests.begin(owner.node_id, self._clock.monotonic())
        again: list[int] = []
        try:
            again = await self._send(owner, shards)
        except TransportError as error:
            again = shards
            self._directory.failed(owner, error)
        finally:
            self._requests.end(owner.node_id, began_s)
            answered = [shard for shard in shards if shard not in again]
            for shard in answered:
                self._pauses.pop(shard, None)
            self.free(answered)
        if again:
            await self._rest(again)

    async def _rest(self, shards: list[int]) -> None:
        """Let shards wait, and look for their owners."""
        pause_s = max(self._pauses.get(shard, FIRST_RETRY_S) for shard in shards)
        try:
            await asyncio.sleep(pause_s * self._context.jitter())
            await self._directory.refresh(shards)
        finally:
            for shard in shards:
                self._pauses[shard] = min(2 * pause_s, MAX_RETRY_S)
            self.free(shards)
