"""A process and all its descendants: their work, and their ids. Linux only; elsewhere nothing is known.

A launcher such as torchrun starts its ranks in sessions of their own, so that neither a process group nor a session
holds all of them. Reads every /proc/<pid>/stat, some milliseconds: for another thread than the event loop's.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

#: A process that waits for a slow disk or file server works, with hardly any processor time: a megabyte a second counts
#: as much as the share of a core below which a trainer is idle.
BYTES_PER_S = 50 << 20

_PROC = Path("/proc")
#: Fields of /proc/<pid>/stat, counted after the command's closing parenthesis (proc_pid_stat(5)).
_STATE, _PARENT, _USER_TICKS, _CHILDREN_SYSTEM_TICKS = 0, 1, 11, 14


def descendants(pid: int) -> list[int]:
    """The living processes below `pid`, without it; empty where /proc is missing."""
    return [found for found in _tree(pid) if found != pid]


def work_seconds(pid: int) -> float | None:
    """How long `pid`, its descendants and their ended children have worked; None where it is not known.

    Processor time; time that the living ones waited for a processor, on a machine with more to do than it can; and what
    they have read and written, as if a second were `BYTES_PER_S`.
    """
    tree = _tree(pid)
    if pid not in tree:
        return None
    used_s = sum(tree.values()) / os.sysconf("SC_CLK_TCK")
    return used_s + sum(map(_waited_s, tree)) + sum(map(_moved_bytes, tree)) / BYTES_PER_S


def _waited_s(pid: int) -> float:
    """Time that the threads of a process were ready to run and did not; 0 where the kernel does not count it."""
    waited_ns = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        for thread in os.listdir(_PROC / str(pid) / "task"):  # noqa: PTH208 - as in `_tree`
            waited_ns += int((_PROC / str(pid) / "task" / thread / "schedstat").read_text().split()[1])
    return waited_ns / 1e9


def _moved_bytes(pid: int) -> int:
    """Read and written by calls, and read from disks, also into mapped files."""
    with contextlib.suppress(OSError, ValueError):
        rows = dict(line.split(": ") for line in (_PROC / str(pid) / "io").read_text().splitlines())
        return sum(int(rows.get(name, "0")) for name in ("rchar", "wchar", "read_bytes"))
    return 0


def with_variable(name: str, value: str) -> list[int]:
    """The processes of this user that were started with this environment variable, wherever they are in the tree;
    empty where /proc is missing. Children inherit it, so it finds those whose parents have ended."""
    wanted = f"{name}={value}".encode()
    found = []
    with contextlib.suppress(OSError):
        for entry in os.listdir(_PROC):  # noqa: PTH208 - as in `_tree`
            if not entry.isdecimal():
                continue
            with contextlib.suppress(OSError):
                if wanted in (_PROC / entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
    return found


def _tree(root: int) -> dict[int, int]:
    """Processor time in clock ticks of `root` and its descendants, by process id."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(_PROC):  # noqa: PTH208 - names, not paths: a machine has thousands of processes
            fields = _fields(int(name)) if name.isdecimal() else None
            if fields is not None and fields[_STATE] not in "ZX":
                ticks[int(name)] = sum(map(int, fields[_USER_TICKS : _CHILDREN_SYSTEM_TICKS + 1]))
                children.setdefault(int(fields[_PARENT]), []).append(int(name))
    found: dict[int, int] = {}
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        if pid in ticks and pid not in found:
            found[pid] = ticks[pid]
            waiting.extend(children.get(pid, ()))
    return found


def _fields(pid: int) -> list[str] | None:
    with contextlib.suppress(OSError):
        return (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return None
