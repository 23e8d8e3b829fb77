"""Runs a service until it is cancelled: after a fault, which is reported, the service begins again.

A task whose coroutine raises ends without a word, and what it did is not done any more until the node is restarted. So
whatever runs as long as its node runs under `supervised`. A service that fails again and again is begun more and more
rarely, and its faults fill no log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from math import inf

from overlay.environment import Log

#: Before a service begins again; doubled after each fault, unless it has run for longer than the longest pause before.
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 8.0

OnFault = Callable[[str, Exception], None]


def logged(log: Log) -> OnFault:
    """The report of a fault where a class has no event of its own for it."""

    def on_fault(name: str, error: Exception) -> None:
        log.error("service_failed", service=name, error=repr(error))

    return on_fault


async def supervised(name: str, service: Callable[[], Awaitable[None]], on_fault: OnFault) -> None:
    """Run a service until it ends by itself or is cancelled. `on_fault` is called with its name and each fault; what it
    raises ends the service."""
    now, pause_s = asyncio.get_running_loop().time, FIRST_PAUSE_S
    while True:
        began_s = now()
        try:
            return await service()
        except Exception as error:
            on_fault(name, error)
        if now() - began_s > MAX_PAUSE_S:
            pause_s = FIRST_PAUSE_S
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


class Rota:
    """Jobs of one service, each of which is done again and again after its own pause. They share one task: each task
    that sleeps takes 2.5 KB. One job is done at a time, so a long one delays the others. A job that fails does not keep
    the others from being done: begun again, the service goes on where it was."""

    def __init__(self, *jobs: tuple[Callable[[], Awaitable[None]], Callable[[], float]]) -> None:
        """`jobs`: what is done, and the seconds before it is done again."""
        self.jobs = jobs
        self._due_s = [inf] * len(jobs)

    async def run(self) -> None:
        """Do the jobs until cancelled."""
        now = asyncio.get_running_loop().time
        while True:
            for number, (_, pause_s) in enumerate(self.jobs):
                if self._due_s[number] == inf:  # it was done just now, or it failed
                    self._due_s[number] = now() + pause_s()
            due_s = min(self._due_s)
            await asyncio.sleep(due_s - now())
            number = self._due_s.index(due_s)
            self._due_s[number] = inf
            await self.jobs[number][0]()
