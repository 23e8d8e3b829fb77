"""Cuts long work on the event loop, so that other tasks run in between, or gives it to a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from overlay.environment import Executor

P = ParamSpec("P")
R = TypeVar("R")

#: Values decoded, added or copied before other tasks run: about half a millisecond of work.
VALUES_PER_TURN = 1 << 18


#: An identity in a message takes as long to be put in order as so many values to be added.
VALUES_PER_ROW = 1 << 10

#: The same for an update of a named value to be decoded, applied or answered: about ten microseconds.
VALUES_PER_UPDATE = 1 << 12

#: A delta is decoded and replicated in parts of so many values: as a whole it would take six more bytes per value at
#: its owner, and as much again at the backup.
VALUES_PER_PART = 1 << 22


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
