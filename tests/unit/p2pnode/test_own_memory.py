"""The memory of this process: the settings of the C library, and what the kernel counts."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from tests.harness.project.repository import ROOT

#: Brings many buffers one after the other, as a stream does, and prints its page faults. Without huge pages (Linux's
#: PR_SET_THP_DISABLE): with them one fault brings 512 pages in, and how many there are depends on free memory.
BUFFERS = """
import ctypes, resource, sys
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)
from p2pnode.own_memory import tune_malloc
print(tune_malloc() if sys.argv[1] == "kept" else False)
import numpy as np
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(200):
    kept = [np.empty(1 << 18, np.uint8) for _ in range(8)]
    for buffer in kept:
        buffer[:] = 1
    del kept, buffer
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def printed(code: str, *arguments: str, **environment: str) -> list[str]:
    """The words that this code prints in a process of its own."""
    found = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={"PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return found.stdout.split()


def faults(way: str) -> tuple[str, int]:
    took, count = printed(BUFFERS, way)
    return took, int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told anything")
def test_buffers_that_come_and_go_do_not_cost_fresh_pages_each_time() -> None:
    """With the setting, two hundred rounds of 2 MB fault few pages in again; without it, most of them."""
    # The smallest of three: the kernel may take pages back from any process while memory is short.
    with_setting = [faults("kept") for _ in range(3)]
    kept = min(count for _, count in with_setting)
    plain = max(faults("plain")[1] for _ in range(3))

    print(f"page faults: {kept} kept, {plain} without")
    assert all(took == "True" for took, _ in with_setting)
    assert kept < 5000, (kept, plain)
    if plain < 5000:
        pytest.skip(f"this system counts {plain} page faults without the setting: nothing to compare with")
    assert kept < plain / 4, (kept, plain)


def test_the_environment_has_the_last_word() -> None:
    """glibc's own environment variables take precedence."""
    code = "from p2pnode.own_memory import tune_malloc; print(tune_malloc())"

    assert printed(code, MALLOC_TRIM_THRESHOLD_="131072") == ["False"]


GIVEN_BACK = """
from pathlib import Path
from p2pnode.own_memory import trim_heap, tune_malloc

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])

tune_malloc()
held = [bytes(1000) for _ in range(30_000)]
last = bytes(1000)
full = resident()
del held
kept = resident()
trim_heap()
print(full, kept, resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps freed pages")
def test_what_the_start_has_freed_goes_back_once() -> None:
    """30 MB freed below what is in use stay with the process until they are given back."""
    full, kept, given = (4 * int(pages) / 1024 for pages in printed(GIVEN_BACK, PYTHONMALLOC="malloc"))

    print(f"{full:.0f} MB, {kept:.0f} MB freed, {given:.0f} MB given back")
    assert kept > full - 5
    assert given < full - 20


THREADS = """
import threading
from pathlib import Path
from p2pnode.own_memory import tune_malloc

assert tune_malloc()
import numpy as np

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])

def work(together):
    together.wait()
    buffers = [np.ones(1 << 20, np.float32) for _ in range(10)]
    together.wait()
    for buffer in buffers:
        buffer[:] = 2.0

before = resident()
for _ in range(3):
    together = threading.Barrier(4)
    threads = [threading.Thread(target=work, args=(together,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has a heap per thread")
def test_what_is_kept_is_bounded_for_all_threads_together() -> None:
    """Four threads with buffers of 40 MB each leave 64 MB behind, not as much for each."""
    kept = 4096 * int(*printed(THREADS)) / 2**20
    print(f"{kept:.0f} MiB kept")
    assert kept < 64 + 16


#: Prints private bytes with 32 MB of shared memory in use, and what the kernel says of it.
MAPPED = """
import mmap
from pathlib import Path
import numpy as np
from p2pnode.own_memory import private_bytes
shared = mmap.mmap(-1, 32 << 20)
np.frombuffer(shared, np.uint8)[:] = 1
own = private_bytes()
(line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("RssAnon:"))
print(own, 1024 * int(line.split()[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_memory_that_is_a_files_or_shared_is_not_private() -> None:
    """The number is the kernel's own of anonymous memory, but for what is allocated between both."""
    private_bytes, anonymous_bytes = map(int, printed(MAPPED))
    assert abs(private_bytes - anonymous_bytes) < 1 << 20
