"""Tunes glibc's allocator for the daemon, once at the start.

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
import os
import sys

#: Free memory kept at the top of the heap: enough for some of the largest shards and their buffers.
KEPT_BYTES = 64 << 20
#: Allocations of at least this size use mmap and are returned at once. The largest value that glibc accepts.
OWN_PAGES_BYTES = 32 << 20

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
