"""The memory control group of this process and its trainers: its limit, how many processes the kernel killed there, and
which it kills first.

Version 2 counts them in `memory.events`, version 1 in `memory.oom_control`.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

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
