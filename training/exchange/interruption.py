"""Work of the present task that another may end, as if the task were cancelled, while the task itself goes on."""

from __future__ import annotations

import asyncio


class Interruptible:
    """One piece of such work: made where it begins, in `group` until `done`.

    As `asyncio.timeout` does it, a cancellation by `interrupt` is told from one by others (`was_interrupted`).
    """

    def __init__(self, group: dict[Interruptible, None]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._group = group
        self._is_ending = False
        self.ended = asyncio.Event()
        group[self] = None

    def interrupt(self) -> None:
        """End it where it waits."""
        if not self._is_ending:
            self._is_ending = True
            self._task.cancel()

    def was_interrupted(self) -> bool:
        """Whether the cancellation that has arrived is that of `interrupt`, and of nobody else; then the task goes
        on."""
        return self._is_ending and self._task.uncancel() <= self._cancelling

    def done(self) -> None:
        """The work has ended, in whatever way."""
        del self._group[self]
        self.ended.set()


async def interrupt_all(group: dict[Interruptible, None]) -> None:
    """End all of a group, and wait until each has ended."""
    for one in list(group):
        one.interrupt()
    while group:
        await next(iter(group)).ended.wait()
