"""The real environment of a node: the machine's clocks, its randomness, a folder on its disk, and a pool of threads."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import platform
import random
import struct
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from p2pnode.overlay.environment import P, R

SLICE_S = 0.0002
WORKER_SLICE_S = 0.0005
#: How much nicer the threads of the pool are than the thread that makes it.
WORKER_NICE = 5

#: Number of the call `sched_setattr`: x86-64's own, and the one that newer architectures share.
_CALLS = {"x86_64": 314, "aarch64": 274, "riscv64": 274, "loongarch64": 274}
#: Size, policy, flags, niceness, priority, slice, deadline, period in ns (sched_setattr(2), first version).
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
#: Threads and processes that are started later have the system's slice, unless they ask themselves.
_SCHED_FLAG_RESET_ON_FORK = 1


def shorten_slice(slice_s: float = SLICE_S) -> bool:
    """Ask for slices of so many seconds (0.0001 to 0.1) for the calling thread; whether the system accepted it.

    An older Linux accepts it and changes nothing."""
    if not sys.platform.startswith("linux") or platform.machine() not in _CALLS:
        return False
    if os.sched_getscheduler(0) != os.SCHED_OTHER:  # somebody has chosen another policy for this process
        return False
    attributes = _ATTRIBUTES.pack(
        _ATTRIBUTES.size, os.SCHED_OTHER, _SCHED_FLAG_RESET_ON_FORK, os.getpriority(os.PRIO_PROCESS, 0), 0,
        round(slice_s * 1e9), 0, 0,
    )  # fmt: skip
    with contextlib.suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(None).syscall(_CALLS[platform.machine()], 0, attributes, 0) == 0)
    return False


class SystemClock:
    """The machine's clocks."""

    #: Not a method of its own: each request asks a dozen times.
    monotonic = staticmethod(time.monotonic)

    def wall(self) -> float:
        return time.time()


class SystemEntropy:
    """The operating system's randomness; the generator is seeded from it once."""

    def __init__(self) -> None:
        self._random = random.Random(os.urandom(32))

    @property
    def random(self) -> random.Random:
        return self._random

    def token(self, size_bytes: int) -> bytes:
        return os.urandom(size_bytes)


#: A large file is synced after each such part. Otherwise the kernel collects gigabytes to be written, and then makes
#: every process that writes wait for them.
SYNC_BYTES = 32 * 1024 * 1024


class FolderFile:
    """A new file in a folder; implements `overlay.environment.NewFile`. Writing releases the GIL."""

    def __init__(self, path: Path, *, private: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = path
        self._temporary = path.with_name(path.name + ".tmp")
        self._descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if private else 0o644)
        self._unsynced_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not memoryview(data).nbytes:
            return  # memory of no bytes cannot be cast
        left = memoryview(data).cast("B")
        self._unsynced_bytes += len(left)
        while len(left):
            left = left[os.write(self._descriptor, left) :]
        if self._unsynced_bytes >= SYNC_BYTES:
            getattr(os, "fdatasync", os.fsync)(self._descriptor)  # macOS has no fdatasync
            self._unsynced_bytes = 0

    def commit(self, *, is_synced: bool = True) -> None:
        if is_synced:
            os.fsync(self._descriptor)
        self._close()
        self._temporary.replace(self._path)
        if is_synced:
            _sync_folder(self._path.parent)

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            self._temporary.unlink(missing_ok=True)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class FolderDisk:
    """A folder on the disk of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, name: str) -> bytes | None:
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes, *, private: bool = False, is_synced: bool = True) -> None:
        file = FolderFile(self.folder / name, private=private)
        try:
            file.write(data)
            file.commit(is_synced=is_synced)
        except BaseException:
            file.discard()
            raise

    def create(self, name: str) -> FolderFile:
        return FolderFile(self.folder / name)

    def size(self, name: str) -> int | None:
        try:
            return (self.folder / name).stat().st_size
        except FileNotFoundError:
            return None

    def read_at(self, name: str, offset: int, size_bytes: int) -> bytes:
        with (self.folder / name).open("rb", buffering=0) as file:
            file.seek(offset)
            return file.read(size_bytes)

    def remove(self, name: str) -> None:
        path = self.folder / name
        path.unlink(missing_ok=True)
        if path.parent != self.folder:
            with contextlib.suppress(OSError):  # not empty yet
                path.parent.rmdir()

    def names(self, folder: str = "") -> list[str]:
        root = self.folder / folder
        return sorted(str(path.relative_to(self.folder)) for path in root.rglob("*") if path.is_file())


def claim(descriptor: int, size_bytes: int) -> None:
    """Give a file this size, and allocate all of it where the system can: what is mapped from it then never lacks room,
    which would end the process. Raises `OSError`."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size_bytes)
    else:
        os.ftruncate(descriptor, size_bytes)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


#: Long enough to give up the core; the kernel adds 0.05 ms.
PAUSE_S = 0.00005


class ThreadExecutor:
    """A small pool of threads for disk and vector arithmetic: some may wait for a slow disk while others compute.

    On Linux each thread has its own niceness and slice of time. Their niceness is `WORKER_NICE` above that of the
    thread that makes the pool, and their slices are short, so that the event loop, which answers other nodes, does not
    wait long for a core behind them (docs/performance.md).
    """

    def __init__(self, threads: int = 4) -> None:
        self._pool = ThreadPoolExecutor(
            max_workers=threads,
            thread_name_prefix="p2pnode-worker",
            initializer=_step_back,
        )

    async def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))

    def pause(self) -> None:
        """Sleep for a moment. A loop that has had more than its share of the core gets it now; otherwise it would wait
        for the end of the work, or for the kernel's next tick, up to 10 ms later."""
        time.sleep(PAUSE_S)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


async def in_thread(function: Callable[P, R], /, *arguments: P.args, **named: P.kwargs) -> R:
    """The result of a function that is called once in a while, from a thread that nobody has to end."""
    executor = ThreadExecutor(1)
    try:
        return await executor.run(function, *arguments, **named)
    finally:
        executor.close()


def _step_back() -> None:
    """Make the calling thread nicer, with short slices; where it may not it is left as it is."""
    if sys.platform != "linux":
        return  # the whole process would be nicer
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + WORKER_NICE)
    shorten_slice(WORKER_SLICE_S)
