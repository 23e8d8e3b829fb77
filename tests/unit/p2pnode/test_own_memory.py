"""The memory of this process, as the kernel and the allocator count it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness.project.repository import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")

#: Prints private and free bytes at first, with 64 MB in use, and with them freed: they stay in the heap, below a block
#: that is in use.
USE_AND_FREE = """
import numpy as np
from p2pnode.malloc import tune_malloc
from p2pnode.own_memory import own_memory
tune_malloc()
print(*own_memory())
used = [np.ones(1 << 20, np.float64) for _ in range(8)]
last = np.ones(1 << 20, np.float64)
print(*own_memory())
del used
print(*own_memory())
"""


def test_private_memory_grows_with_what_is_used_and_freed_memory_is_the_heaps() -> None:
    """72 MB more are private once they are written to; 64 MB of them are free in the heap afterwards, and private."""
    found = subprocess.run(
        [sys.executable, "-c", USE_AND_FREE],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    (first, _), (used, used_free), (after, after_free) = (
        (int(private), int(free)) for private, free in (line.split() for line in found.stdout.splitlines())
    )

    megabyte = 1 << 20
    assert 70 * megabyte < used - first < 76 * megabyte
    assert 63 * megabyte < after_free - used_free < 66 * megabyte
    assert abs(after - used) < megabyte


#: Prints private bytes with 32 MB of shared memory in use, and what the kernel says of it.
MAPPED = """
import mmap
from pathlib import Path
import numpy as np
from p2pnode.own_memory import own_memory
shared = mmap.mmap(-1, 32 << 20)
np.frombuffer(shared, np.uint8)[:] = 1
own = own_memory()
(line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("RssAnon:"))
print(own.private_bytes, 1024 * int(line.split()[1]))
"""


def test_memory_that_is_a_files_or_shared_is_not_private() -> None:
    """The number is the kernel's own of anonymous memory, but for what is allocated between both."""
    found = subprocess.run(
        [sys.executable, "-c", MAPPED],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    private_bytes, anonymous_bytes = map(int, found.stdout.split())
    assert abs(private_bytes - anonymous_bytes) < 1 << 20
