"""The real environment: a disk that writes whole files or none, entropy, clocks, and a pool of threads."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import subprocess
import sys
import threading
import time
from array import array
from pathlib import Path
from typing import Any

import pytest

from p2pnode.overlay import system
from p2pnode.overlay.supervision import FIRST_PAUSE_S, MAX_PAUSE_S, logged, supervised
from p2pnode.overlay.system import FolderDisk, SystemClock, SystemEntropy, ThreadExecutor
from tests.harness.environment.simulated import ListLog
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by


def test_disk_round_trip(tmp_path: Path) -> None:
    """What was written is read back; missing files are None; names are sorted and relative."""
    disk = FolderDisk(tmp_path / "state")
    assert disk.names() == []
    assert disk.read("nothing") is None
    disk.write("b/two", b"2")
    disk.write("b/one", b"1")
    disk.write("a", b"0")
    disk.write("a", b"00")
    assert disk.read("a") == b"00"
    assert disk.read("b/one") == b"1"
    assert disk.names() == ["a", "b/one", "b/two"]
    assert disk.names("b") == ["b/one", "b/two"]
    disk.remove("a")
    disk.remove("a")
    assert disk.read("a") is None


def test_private_files(tmp_path: Path) -> None:
    """A private file is readable by its owner only, whatever it replaces; other files are not restricted."""
    disk = FolderDisk(tmp_path)
    disk.write("key", b"open")
    disk.write("key", b"secret", private=True)
    disk.write("peers", b"[]")
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "peers").stat().st_mode) & 0o400


def test_a_file_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It appears whole with `commit`, replaces the former one, takes memory of any type, and is synced part by part."""
    monkeypatch.setattr(system, "SYNC_BYTES", 8)
    synced = 0
    fdatasync = os.fdatasync

    def count(descriptor: int) -> None:
        nonlocal synced
        synced += 1
        fdatasync(descriptor)

    monkeypatch.setattr(os, "fdatasync", count)
    disk = FolderDisk(tmp_path)
    disk.write("folder/x", b"old")
    file = disk.create("folder/x")
    for piece in (b"12345678", memoryview(array("f", [1.0, 2.0])), b"", memoryview(array("f")), bytearray(b"end")):
        file.write(piece)
    assert disk.read("folder/x") == b"old"
    assert synced == 2

    file.commit()
    file.discard()
    content = b"12345678" + array("f", [1.0, 2.0]).tobytes() + b"end"
    assert disk.read("folder/x") == content
    assert disk.names() == ["folder/x"]
    assert (disk.size("folder/x"), disk.size("folder/y")) == (len(content), None)
    assert disk.read_at("folder/x", 4, 6) == content[4:10]
    assert disk.read_at("folder/x", len(content) - 2, 100) == b"nd"
    with pytest.raises(FileNotFoundError):
        disk.read_at("folder/y", 0, 1)


def test_a_file_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    """The former one stays; giving it up twice is no error."""
    disk = FolderDisk(tmp_path)
    disk.write("x", b"old")
    file = disk.create("x")
    file.write(b"new")
    file.discard()
    file.discard()

    assert disk.names() == ["x"]
    assert disk.read("x") == b"old"


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A full disk at any moment raises, leaves the old content, and nothing half-written beside it."""
    disk = FolderDisk(tmp_path)
    disk.write("x", b"old")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if call == "replace":
        monkeypatch.setattr(Path, "replace", full)
    elif call == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    else:
        monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        disk.write("x", b"new")
    monkeypatch.undo()
    assert disk.read("x") == b"old"
    assert disk.names() == ["x"]


def test_unreadable(tmp_path: Path) -> None:
    """Reading a folder as a file is an `OSError`, not None."""
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        FolderDisk(tmp_path).read("folder")


def test_entropy() -> None:
    """Tokens have the asked size and differ, and so do two generators."""
    one, two = SystemEntropy(), SystemEntropy()
    assert len(one.token(20)) == 20
    assert one.token(20) != one.token(20)
    assert one.random.random() != two.random.random()


def test_clock() -> None:
    """Both clocks are those of the machine."""
    clock = SystemClock()
    assert abs(clock.wall() - time.time()) < 5
    assert abs(clock.monotonic() - time.monotonic()) < 5


@run_by(asyncio.run)
async def test_thread_executor() -> None:
    """A function runs off the loop's thread, with its arguments, and its exception comes back."""
    workers = ThreadExecutor()
    assert await workers.run(threading.get_ident) != threading.get_ident()
    assert await workers.run(int, "ff", base=16) == 255
    with pytest.raises(ValueError, match="invalid"):
        await workers.run(int, "x")
    workers.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a niceness for each thread")
@run_by(asyncio.run)
async def test_workers_are_nicer_than_the_loop() -> None:
    """Threads of the pool let the thread of the event loop go first, whose niceness stays as it was."""

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before, workers = niceness(), ThreadExecutor()
    assert await workers.run(niceness) == min(before + 5, 19)
    assert niceness() == before
    workers.close()


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


class Service:
    """Fails each time it is begun, after as many seconds as `lives` has for it; then it ends by itself."""

    def __init__(self, lives: list[float]) -> None:
        self.begun: list[float] = []
        self._lives = lives

    async def run(self) -> None:
        self.begun.append(asyncio.get_running_loop().time())
        if self._lives:
            await asyncio.sleep(self._lives.pop(0))
            raise KeyError(len(self.begun))

    @property
    def pauses(self) -> list[float]:
        return [round(after - before, 3) for before, after in zip(self.begun, self.begun[1:], strict=False)]


@run_by(run)
async def test_a_service_that_failed_begins_again_and_each_fault_is_logged() -> None:
    """The pauses double up to the longest; a service that ends by itself is not begun again."""
    service, log = Service([0.0] * 6), ListLog([])
    await supervised("reader", service.run, logged(log))

    assert service.pauses == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert (FIRST_PAUSE_S, MAX_PAUSE_S) == (1.0, 8.0)
    assert [record.fields for record in log.of("service_failed")] == [
        {"service": "reader", "error": f"KeyError({number})"} for number in range(1, 7)
    ]


@run_by(run)
async def test_a_service_that_ran_for_long_begins_again_soon() -> None:
    """Only faults in a row make the pause longer."""
    service = Service([0.0, 0.0, 20.0, 0.0])
    await supervised("reader", service.run, lambda *_: None)

    assert service.pauses == [1.0, 2.0, 21.0, 2.0]


@run_by(run)
async def test_a_report_that_raises_ends_the_service() -> None:
    """So tests may ask for the fault itself."""

    def raises(_name: str, error: Exception) -> None:
        raise error

    with pytest.raises(KeyError):
        await supervised("reader", Service([0.0]).run, raises)
