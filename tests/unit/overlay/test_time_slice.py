"""The short slices of the event loop's thread and of those that compute for it, read back from the kernel."""

from __future__ import annotations

import subprocess
import sys

import pytest

from p2pnode.overlay import system

#: Prints the slice in ns of the thread that asked, of a thread, of one of the executor and of a process that it started
#: afterwards.
CODE = """
import asyncio, ctypes, platform, struct, subprocess, sys, threading
from p2pnode.overlay import system
from p2pnode.overlay.system import ThreadExecutor

READ = {"x86_64": 315, "aarch64": 275, "riscv64": 275, "loongarch64": 275}

def shown():
    raw = ctypes.create_string_buffer(48)
    assert ctypes.CDLL(None).syscall(READ[platform.machine()], 0, raw, 48, 0) == 0
    print(struct.unpack_from("=IIQiIQ", raw.raw)[5], flush=True)

code = sys.argv[1]
if code:
    print(system.shorten_slice(), flush=True)
    shown()
    thread = threading.Thread(target=shown); thread.start(); thread.join()
    asyncio.run(ThreadExecutor().run(shown))
    subprocess.run([sys.executable, "-c", code, ""], check=True)
else:
    shown()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has slices that a thread can choose")
def test_the_loop_has_a_short_slice_and_what_it_starts_has_the_system_s() -> None:
    """Trainers and other threads keep the usual slice; those that compute for the loop have one in between."""
    asked = subprocess.run(
        [sys.executable, "-c", CODE, CODE], capture_output=True, text=True, check=True
    ).stdout.split()
    accepted, mine, thread, computing, child = asked
    assert accepted == "True"
    if int(mine) == 0:
        pytest.skip("this kernel has no slices of threads (they came with Linux 6.12)")
    assert int(mine) == round(system.SLICE_S * 1e9)
    assert int(computing) == round(system.WORKER_SLICE_S * 1e9)
    assert int(thread) > int(computing) > int(mine)
    assert int(child) > int(mine)


def test_another_system_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the call, on an unknown processor, nothing is tried and the answer is no."""
    monkeypatch.setattr("platform.machine", lambda: "s390x")
    assert system.shorten_slice() is False
