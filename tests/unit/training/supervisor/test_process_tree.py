"""A process with its descendants, as /proc shows them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pnode.training.supervisor import process_tree

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")  # noqa: PTH112

#: A launcher whose rank has a session of its own, as torchrun's have; the rank computes, then waits.
LAUNCHER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1]], start_new_session=True)
"""
RANK = """
import time
while time.process_time() < 0.3: pass
print(1, flush=True)
input()
"""


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER, RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield process
    process.communicate(b"\n", timeout=60)


def test_a_rank_in_a_session_of_its_own_belongs_to_its_launcher(launcher: subprocess.Popen[bytes]) -> None:
    """It is found by its parent, and its work is counted."""
    assert launcher.stdout is not None
    launcher.stdout.readline()

    [rank] = process_tree.descendants(launcher.pid)
    used_s = process_tree.work_seconds(launcher.pid)

    assert os.getsid(rank) != os.getsid(launcher.pid)
    assert used_s is not None
    assert used_s >= 0.3


def test_reading_and_writing_is_work() -> None:
    """A second for 50 MiB, with nearly no processor time: through a pipe, as a slow file server gives its files."""
    code = "import os, sys; [os.read(0, 1 << 16) for _ in range(320)]; print(1, flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        before = process_tree.work_seconds(process.pid)
        for _ in range(320):
            process.stdin.write(bytes(1 << 16))
            process.stdin.flush()
        process.stdout.readline()
        after, waited_s = process_tree.work_seconds(process.pid), process_tree._waited_s(process.pid)
    finally:
        process.communicate(b"\n" * (1 << 20), timeout=60)

    assert before is not None
    assert after is not None
    # Time without a processor is work too, of which a loaded machine has much.
    assert after - before > 10 / 50
    assert after - before - waited_s < 2.0


@pytest.mark.skipif(not os.path.isfile("/proc/self/schedstat"), reason="the kernel counts no waits")  # noqa: PTH113
def test_a_process_that_gets_no_processor_works() -> None:
    """Beside two others on one core, and as nice as can be, it gets next to nothing: that is not the idleness of a
    process that hangs, which adds nothing to its work."""
    spin = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(1, flush=True)\nwhile True: pass"
    idle = "print(1, flush=True); input()"
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for code in (spin, spin, spin, idle)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        starved, hung = started[2].pid, started[3].pid
        os.setpriority(os.PRIO_PROCESS, starved, 19)
        while not sleeps(hung):  # until then it may wait for a processor
            time.sleep(0.01)
        before = [process_tree.work_seconds(pid) or 0.0 for pid in (starved, hung)]
        began, worked_s = time.monotonic(), 0.0
        while worked_s < 0.3 and time.monotonic() - began < 60:  # a wait is counted when it ends
            time.sleep(0.1)
            worked_s = (process_tree.work_seconds(starved) or 0.0) - before[0]
        idle_s = (process_tree.work_seconds(hung) or 0.0) - before[1]
    finally:
        for process in started:
            process.kill()
            process.communicate()

    assert worked_s >= 0.3
    assert idle_s < 0.01


def sleeps(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_of_a_process_that_is_gone_nothing_is_known() -> None:
    """Neither its time nor its children."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()

    assert process_tree.work_seconds(gone.pid) is None
    assert process_tree.descendants(gone.pid) == []


def test_a_process_is_found_by_its_environment() -> None:
    """The variable and its whole value count; a part of it is another value."""
    environment = {**os.environ, "P2PNODE_TEST_MARK": "a-mark-of-this-test"}
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environment)
    try:
        assert process_tree.with_variable("P2PNODE_TEST_MARK", "a-mark-of-this-test") == [process.pid]
        assert process_tree.with_variable("P2PNODE_TEST_MARK", "a-mark") == []
    finally:
        process.communicate(b"\n", timeout=60)
