"""Gives threads short turns on the processor: that of the event loop, so that it does not wait long for one.

Linux from 6.12 on picks, of the threads that have had less than their share, the one whose slice would end first
(EEVDF). A thread that asks for a short slice runs soon after it has woken, and is interrupted more often in return; its
share of the processor stays the same. A daemon beside trainers on every core answers sooner by it
(docs/performance.md). The threads that compute for the loop have longer slices than it has, and shorter ones than the
system's: once the loop has had more than its share, it waits for the end of theirs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import sys

SLICE_S = 0.0002
WORKER_SLICE_S = 0.0005

#: Number of the call `sched_setattr`: x86-64's own, and the one that newer architectures share.
_CALLS = {"x86_64": 314, "aarch64": 274, "riscv64": 274, "loongarch64": 274}
#: Size, policy, flags, niceness, priority, slice, deadline, period in ns (sched_setattr(2), first version).
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
#: Threads and processes that are started later have the system's slice, unless they ask themselves.
_SCHED_FLAG_RESET_ON_FORK = 1


def shorten_slice(slice_s: float = SLICE_S) -> bool:
    """Ask for slices of so many seconds (0.0001 to 0.1) for the calling thread; whether the system accepted it.

    An older Linux accepts it and changes nothing."""
    if not sys.platform.startswith("linux") or platform.machine() not in _CALLS:
        return False
    if os.sched_getscheduler(0) != os.SCHED_OTHER:  # somebody has chosen another policy for this process
        return False
    attributes = _ATTRIBUTES.pack(
        _ATTRIBUTES.size, os.SCHED_OTHER, _SCHED_FLAG_RESET_ON_FORK, os.getpriority(os.PRIO_PROCESS, 0), 0,
        round(slice_s * 1e9), 0, 0,
    )  # fmt: skip
    with contextlib.suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).syscall(_CALLS[platform.machine()], 0, attributes, 0) == 0)
    return False
