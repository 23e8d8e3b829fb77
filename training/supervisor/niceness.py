"""Makes a trainer nicer than the daemon, which has to answer other nodes while every core trains.

Linux with autogroups schedules sessions against each other first and processes within a session second (sched(7), "The
autogroup feature"). A trainer has a session of its own, so its niceness alone changes nothing there: two loops on one
core had 155 and 152 ticks each with a niceness of 5 between them, and 226 and 76 once the session had it too.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from pathlib import Path

LARGEST = 19
#: The kernel takes one such write in a tenth of a second from all unprivileged processes of a machine together.
PAUSE_S = 0.11
ATTEMPTS = 20


async def make_nicer(pid: int, nice: int, processes: Path = Path("/proc")) -> None:
    """Give the process that much niceness above this one's, and to its session too if it leads one.

    To be called before the process has threads or children: those that it starts later are as nice. A system without
    niceness or autogroups is left as it is, and so is a process that has ended."""
    with contextlib.suppress(OSError, AttributeError):
        wanted = min(LARGEST, os.getpriority(os.PRIO_PROCESS, 0) + nice)
        os.setpriority(os.PRIO_PROCESS, pid, wanted)
        if not wanted or os.getsid(pid) != pid:
            return
        for _ in range(ATTEMPTS):
            try:
                (processes / str(pid) / "autogroup").write_text(str(wanted))
            except OSError as error:
                if error.errno != errno.EAGAIN:
                    return
                await asyncio.sleep(PAUSE_S)
            else:
                return
