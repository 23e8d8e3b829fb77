"""Restarts a service after a fault, and reports the fault. A service is a coroutine that runs as long as its node.

Without supervision, an exception ends the task of the service. Nobody sees the exception, and the work of the service
stays undone until the node is restarted. `supervised` waits before it restarts a service. The wait doubles after each
fault, up to a limit, so that a service that always fails does not fill the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from p2pnode.overlay.environment import Log

#: The first and the longest pause before a restart. The pause doubles after each fault. It is the first one again after
#: a run that lasted longer than `MAX_PAUSE_S`.
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 8.0

OnFault = Callable[[str, Exception], None]


def logged(log: Log) -> OnFault:
    """A report that logs the event `service_failed`, for services without a more specific event."""

    def on_fault(name: str, error: Exception) -> None:
        log.error("service_failed", service=name, error=repr(error))

    return on_fault


async def supervised(name: str, service: Callable[[], Awaitable[None]], on_fault: OnFault) -> None:
    """Run a service, with restarts after faults, until it returns or is cancelled.

    `on_fault` is called with `name` and the exception. If `on_fault` raises, the service is not restarted, and the
    caller gets that exception.
    """
    now = asyncio.get_running_loop().time
    pause_s = FIRST_PAUSE_S
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
