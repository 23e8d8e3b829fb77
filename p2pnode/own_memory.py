"""Measures the memory of this process: what the kernel counts as its own, and what of that the allocator has free."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = mmap.PAGESIZE


class OwnMemory(NamedTuple):
    """`private_bytes`: resident memory that is neither a file's nor shared. `free_heap_bytes`: of it, at most, what the
    allocator keeps for the next allocations; 0 where the C library does not tell."""

    private_bytes: int
    free_heap_bytes: int


def own_memory() -> OwnMemory | None:
    """The memory of this process now; None where the system does not tell. Linux only.

    Short enough for the event loop, which calls it once or twice a second (docs/performance.md). `/proc/self/status`
    has the same number, and takes half as long again.
    """
    if not sys.platform.startswith("linux"):
        return None
    with contextlib.suppress(OSError, ValueError):
        # Pages: all of them, those resident, and of these those that are a file's or shared (proc_pid_statm(5)).
        with _STATM.open("rb", buffering=0) as file:
            _, resident, shared = file.read().split()[:3]
        private_bytes = _PAGE_BYTES * (int(resident) - int(shared))
        return OwnMemory(private_bytes, _free_heap_bytes(private_bytes))
    return None


class _HeapFigures(ctypes.Structure):
    """glibc's `struct mallinfo2` (malloc.h, since glibc 2.33): `uordblks` and `fordblks` are the used and the free
    bytes of the heap, `hblkhd` those of allocations with pages of their own."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


@cache
def _mallinfo2() -> ctypes._NamedFuncPointer | None:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):  # another C library, or an older one
        return None
    function.restype = _HeapFigures
    return function


def _free_heap_bytes(private_bytes: int) -> int:
    """glibc counts free memory whose pages it has returned as free too: no more of it is resident than what is private
    and not in use."""
    function = _mallinfo2()
    if function is None:
        return 0
    heap = function()
    return max(0, min(int(heap.fordblks), private_bytes - int(heap.uordblks) - int(heap.hblkhd)))
