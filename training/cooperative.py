"""Cuts long work on the event loop, so that other tasks run in between, or gives it to a thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from p2pnode.overlay.environment import Executor
from p2pnode.training import kernels

P = ParamSpec("P")
R = TypeVar("R")

#: Values decoded, added or copied before other tasks run: about half a millisecond of work.
VALUES_PER_TURN = 1 << 18

#: A light pass adds, copies, measures or encodes values in memory that is allocated already, by a compiled kernel. It
#: takes 0.04 to 0.15 ms for `VALUES_PER_TURN` values, so this many share a turn of the loop.
LIGHT_PASSES = 4

#: One array decoded and measured at once: more are given to a thread. For fewer the way to a thread and back takes
#: more processor time than the pass, and two threads wake up.
VALUES_PER_PASS = 1 << 19

#: An identity in a message takes as long to be put in order as so many values to be added.
VALUES_PER_ROW = 1 << 10

#: The same for an update of a named value to be decoded, applied or answered: about ten microseconds.
VALUES_PER_UPDATE = 1 << 12

#: A delta is decoded and replicated, and values are published, in parts of so many: as a whole a delta would take six
#: more bytes per value at its owner, and as much again at the backup, and a published vector four.
VALUES_PER_PART = 1 << 22


def light(values: int) -> int:
    """How many values a light pass over so many counts as. Without compiled kernels it is not light: NumPy makes
    several passes of it."""
    return values if kernels.COMPILED is None else -(-values // LIGHT_PASSES)


async def off_loop(
    executor: Executor, values: int, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
) -> R:
    """The result of a pass over so many values, from a thread where it would hold the loop for long. Fresh memory alone
    costs more than the pass: the kernel clears its pages, 20 ms for 8 MB on a virtual machine."""
    if values <= VALUES_PER_TURN:
        return function(*args, **kwargs)
    return await executor.run(function, *args, **kwargs)


@dataclass(slots=True)
class LoopYielder:
    """Counts the values worked on, and yields to the event loop after every `VALUES_PER_TURN`."""

    done: int = 0

    def is_due(self, values: int) -> bool:
        """So many values have just been worked on; whether other tasks are to run now. For a loop of many small pieces:
        to await `after` costs each of them more."""
        self.done += values
        if self.done < VALUES_PER_TURN:
            return False
        self.done = 0
        return True

    async def after(self, values: int) -> None:
        """So many values have just been worked on. State read earlier may have changed when this returns."""
        if self.is_due(values):
            await asyncio.sleep(0)


@dataclass(slots=True)
class ThreadPauses:
    """Counts the values that a function has worked on in a thread of `executor`, and pauses after every
    `VALUES_PER_TURN`, so that the event loop need not wait for its end where the two share a core. A pause takes
    0.1 ms."""

    executor: Executor
    done: int = 0

    def after(self, values: int) -> None:
        """So many values have just been worked on."""
        self.done += values
        if self.done >= VALUES_PER_TURN:
            self.done = 0
            self.executor.pause()


@dataclass(slots=True)
class LoopTurns:
    """Shares the turns of the event loop among the passes of all tasks: one pass a turn, or several short ones.

    Without it, passes of several tasks that are ready at once would run in one turn, and datagrams and `/status` wait
    for all of them.
    """

    _done: int = 0
    _is_counting: bool = False
    _waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)

    async def take(self, values: int) -> None:
        """Wait until this turn of the loop has room for a pass over so many values: they count as done."""
        if self._waiting or (self._done and self._done + values > VALUES_PER_TURN):
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((values, place))
            await place
        else:
            self._count(values)

    async def run(
        self, executor: Executor, values: int, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """The result of a pass over so many values: in a turn that has room for it, or from a thread if they are
        many."""
        if values > VALUES_PER_PASS:
            return await executor.run(function, *args, **kwargs)
        await self.take(values)
        return function(*args, **kwargs)

    def _count(self, values: int) -> None:
        self._done += values
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._done, self._is_counting = 0, False
        while self._waiting:
            values, place = self._waiting[0]
            if not place.done():  # else cancelled
                if self._done and self._done + values > VALUES_PER_TURN:
                    return  # the first one of this turn has called for the next
                place.set_result(None)
                self._count(values)
            self._waiting.popleft()
