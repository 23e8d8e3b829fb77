"""What the kernel is told of a trainer, and says of it: niceness, and the memory control group of daemon and trainers.

The daemon has to answer other nodes while every core trains, so a trainer is nicer. Linux with autogroups schedules
sessions against each other first and processes within a session second (sched(7), "The autogroup feature"). A trainer
has a session of its own, so its niceness alone changes nothing there: two loops on one core had 155 and 152 ticks each
with a niceness of 5 between them, and 226 and 76 once the session had it too.

The control group has a limit, and counts the processes that the kernel killed there; version 2 in `memory.events`,
version 1 in `memory.oom_control`.
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


_ROOT, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_EVENTS = ("memory.events", "memory.oom_control")
_LIMITS = ("memory.max", "memory.limit_in_bytes")
#: Version 1 has a limit of eight exabytes where there is none.
_NO_LIMIT_BYTES = 1 << 60
#: A daemon whose model takes half of the memory more than its script lives; the most that the kernel takes.
_PREFERENCE, _KILLED_FIRST = 500, 1000


def kills() -> int:
    """Processes of the group that the kernel has killed because memory ran out; 0 where it does not say so."""
    for folder in _folders()[:1]:
        for name in _EVENTS:
            with contextlib.suppress(OSError, ValueError):
                rows = (line.partition(" ") for line in (folder / name).read_text().splitlines())
                return sum(int(count) for row, _, count in rows if row == "oom_kill")
    return 0


def kill_first(pid: int, processes: Path = Path("/proc")) -> None:
    """Have the kernel prefer this process, and those that it starts later, to the daemon where memory runs out.

    A daemon that is killed for the memory of its script can neither say why nor hand its shards over. Linux adds
    `oom_score_adj` thousandths of the limit to the memory that a process has (proc_pid_oom_score_adj(5)). A system
    without such a file, and a process that has ended, are left as they are."""
    with contextlib.suppress(OSError, ValueError):
        own = int((processes / "self" / "oom_score_adj").read_text())
        (processes / str(pid) / "oom_score_adj").write_text(str(min(_KILLED_FIRST, own + _PREFERENCE)))


def limit_bytes() -> int | None:
    """The lowest limit of the group and those around it; None without one."""
    found = []
    for folder in _folders():
        for name in _LIMITS:
            with contextlib.suppress(OSError, ValueError):
                found.append(int((folder / name).read_text()))
    return min((limit for limit in found if limit < _NO_LIMIT_BYTES), default=None)


def _folders() -> list[Path]:
    """The group's folder, and those around it. In a container its own path may be hidden: then that of the mount."""
    groups: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in _OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            groups |= dict.fromkeys(controllers.split(","), path)
    is_first_version = "memory" in groups
    root = _ROOT / "memory" if is_first_version else _ROOT
    own = root / groups.get("memory" if is_first_version else "", "/").lstrip("/")
    return [folder for folder in (own, *own.parents) if folder.is_dir() and folder.is_relative_to(root)] or [root]
