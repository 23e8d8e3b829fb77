"""What the C library is told about this process's memory, once, at the start.

By itself glibc gives freed pages back to the kernel as soon as they lie on top of the heap, and claims them anew for
the next buffer a stream brings: the receiver of a transfer spent most of its time on page faults (1.3 against 0.5
processor seconds per GB, docs/performance.md). What is kept is bounded: more than `KEPT_BYTES` of free memory on top
goes back.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys

#: Free memory on top of the heap that is kept: some of the largest shards and the buffers around them.
KEPT_BYTES = 64 << 20
#: Allocations from this size have pages of their own, which go back at once. glibc's own largest value.
OWN_PAGES_BYTES = 32 << 20

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def trim_heap() -> None:
    """Return what importing and starting have freed: once, before the node's own memory lies above it. What is left
    stays, and is not looked through again: later collections hold the loop for less."""
    gc.collect()
    gc.freeze()
    with contextlib.suppress(OSError, AttributeError):  # another C library has no such call
        ctypes.CDLL(None).malloc_trim(0)


def tune_malloc() -> bool:
    """Whether the C library is glibc and took it; whoever sets its environment variables knows better."""
    named = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if named or not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library, such as musl, has none
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, OWN_PAGES_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
