"""The memory of this process: tunes glibc's allocator once at the start, and measures what the kernel counts.

By default glibc returns freed pages at the top of the heap to the kernel. It requests them again for the next buffer of
a stream. The receiver of a transfer then spends most of its time on page faults (1.3 against 0.5 processor seconds per
GB, docs/performance.md). Kept memory is bounded: free memory above `KEPT_BYTES` is returned. That bound is for one
heap. glibc would give each of the threads that encode and decode a heap of its own; here all share one. Free memory
below what is in use stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import sys
from pathlib import Path

#: Free memory kept at the top of the heap: enough for some of the largest shards and their buffers.
KEPT_BYTES = 64 << 20
#: Allocations of at least this size use mmap and are returned at once. The largest value that glibc accepts.
OWN_PAGES_BYTES = 32 << 20

_STATM = Path("/proc/self/statm")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def trim_heap() -> None:
    """Return the memory that imports and start-up have freed, before the node's own allocations follow it on the heap.

    The remaining objects are frozen: later garbage collections skip them and block the loop for less time."""
    gc.collect()
    gc.freeze()
    with contextlib.suppress(OSError, AttributeError):  # another C library, such as musl
        ctypes.CDLL(None).malloc_trim(0)


def tune_malloc() -> bool:
    """Set glibc's thresholds; whether it accepted them. The user's own allocator variables take precedence."""
    named = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if named or not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library, such as musl, has none
        return False
    chosen = (_M_MMAP_THRESHOLD, OWN_PAGES_BYTES), (_M_TRIM_THRESHOLD, KEPT_BYTES), (_M_ARENA_MAX, 1)
    return all(mallopt(name, value) for name, value in chosen)


def resident_bytes() -> int | None:
    """Resident memory of this process; None where the system does not tell."""
    pages = _pages()
    return None if pages is None else mmap.PAGESIZE * pages[0]


def private_bytes() -> int | None:
    """The part of it that is neither a file's nor shared."""
    pages = _pages()
    return None if pages is None else mmap.PAGESIZE * (pages[0] - pages[1])


def _pages() -> tuple[int, int] | None:
    """Those resident, and of these those that are a file's or shared (proc_pid_statm(5)). `/proc/self/status` has the
    same numbers, and takes half as long again."""
    with contextlib.suppress(OSError, ValueError), _STATM.open("rb", buffering=0) as file:
        _, resident, shared = file.read().split()[:3]
        return int(resident), int(shared)
    return None
