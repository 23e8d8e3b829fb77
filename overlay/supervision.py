"""Runs a service until it is cancelled: after a fault, which is reported, the service begins again.

A task whose coroutine raises ends without a word, and what it did is not done any more until the node is restarted. So
whatever runs as long as its node runs under `supervised`. A service that fails again and again is begun more and more
rarely, and its faults fill no log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from p2pnode.overlay.environment import Log

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
