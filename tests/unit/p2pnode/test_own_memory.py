"""The memory of this process, as the kernel counts it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness.project.repository import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")

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
