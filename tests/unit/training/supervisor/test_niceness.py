"""The niceness of a trainer, and of its session where the kernel schedules sessions."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pnode.training.supervisor.kernel import LARGEST, make_nicer

AUTOGROUP = Path("/proc/self/autogroup")


@pytest.fixture(name="leader")
def _leader() -> Iterator[subprocess.Popen[bytes]]:
    """A process that leads a session of its own, as trainers do, and waits."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, start_new_session=True
    )
    yield process
    process.communicate()


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel does not schedule sessions")
@pytest.mark.parametrize("nice", [5, 40])
def test_the_session_of_a_trainer_is_as_nice_as_the_trainer(leader: subprocess.Popen[bytes], nice: int) -> None:
    """The kernel shares a core among sessions first, so that the niceness of the process alone has no effect."""
    asyncio.run(make_nicer(leader.pid, nice))
    wanted = min(LARGEST, os.getpriority(os.PRIO_PROCESS, 0) + nice)
    assert os.getpriority(os.PRIO_PROCESS, leader.pid) == wanted
    assert Path(f"/proc/{leader.pid}/autogroup").read_text().split("nice")[1].strip() == str(wanted)


def test_a_write_that_comes_too_soon_is_tried_again(
    leader: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes one in a tenth of a second, and several nodes of a machine start their trainers together."""
    refused = [errno.EAGAIN, errno.EAGAIN]
    written: list[tuple[Path, str]] = []

    def write_text(path: Path, text: str) -> int:
        if refused:
            raise OSError(refused.pop(), "not yet")
        written.append((path, text))
        return len(text)

    monkeypatch.setattr(Path, "write_text", write_text)
    monkeypatch.setattr("p2pnode.training.supervisor.kernel.PAUSE_S", 0.0)
    asyncio.run(make_nicer(leader.pid, 3, tmp_path))
    assert written == [(tmp_path / str(leader.pid) / "autogroup", str(os.getpriority(os.PRIO_PROCESS, 0) + 3))]


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EACCES])
def test_a_system_without_sessions_to_schedule_is_left_as_it_is(
    leader: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The process itself is nicer all the same, and nothing is raised or tried again."""
    tries: list[Path] = []

    def write_text(path: Path, text: str) -> int:
        tries.append(path)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "write_text", write_text)
    asyncio.run(make_nicer(leader.pid, 2, tmp_path))
    assert len(tries) == 1
    assert os.getpriority(os.PRIO_PROCESS, leader.pid) == os.getpriority(os.PRIO_PROCESS, 0) + 2


def test_a_process_that_has_ended_is_no_error() -> None:
    """A trainer may end at once; its end is reported by who waits for it."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    asyncio.run(make_nicer(process.pid, 5))
