"""The other doors: clock, entropy, disk, thread pool and log, each a small interface with its real implementation.

Decisions never touch these: they get `now`, a `random.Random`, bytes. Services get the doors from the composition
root, so that the simulated network can put a virtual clock, seeded entropy, a disk that tears, and threads that run
inline behind the same code.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Clock(Protocol):
    """`monotonic` is the time of the running loop, in seconds; `wall` is seconds since 1970 and may jump.

    Waiting is `asyncio.sleep` and `asyncio.timeout`: under simulation the loop itself is virtual.
    """

    def monotonic(self) -> float: ...

    def wall(self) -> float: ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class Entropy(Protocol):
    """Randomness. `random` is for sampling and jitter; `token` is for keys, nonces and message ids."""

    @property
    def random(self) -> random.Random: ...

    def token(self, size_bytes: int) -> bytes: ...


class SystemEntropy:
    """The operating system's randomness; the generator is seeded from it once."""

    def __init__(self) -> None:
        self._random = random.Random(os.urandom(32))

    @property
    def random(self) -> random.Random:
        return self._random

    def token(self, size_bytes: int) -> bytes:
        return os.urandom(size_bytes)


class Disk(Protocol):
    """A node's state directory, addressed by relative names such as `identity.key` or `checkpoint/step-40.json`.

    Synchronous: call it through `Workers.run` when the data is large or must be synced.
    """

    def read(self, name: str) -> bytes | None:
        """The whole content, or None where there is no such file. `OSError` when it cannot be read."""
        ...

    def write(self, name: str, data: bytes, *, private: bool = False) -> None:
        """Replace the file whole or not at all, synced to disk. `private` makes it readable by the owner only."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file; a missing one is no error."""
        ...

    def names(self, folder: str = "") -> list[str]:
        """Sorted relative names of the files under a folder."""
        ...


class FolderDisk:
    """A folder on the machine's own disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, name: str) -> bytes | None:
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes, *, private: bool = False) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = path.with_name(path.name + ".tmp")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if private else 0o644)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(path.parent)

    def remove(self, name: str) -> None:
        path = self.folder / name
        path.unlink(missing_ok=True)
        if path.parent != self.folder:
            with contextlib.suppress(OSError):  # not empty yet
                path.parent.rmdir()

    def names(self, folder: str = "") -> list[str]:
        root = self.folder / folder
        return sorted(str(path.relative_to(self.folder)) for path in root.rglob("*") if path.is_file())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Workers(Protocol):
    """Runs a synchronous function off the loop. The function must let go of the GIL for long work to be harmless."""

    async def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...


class ThreadWorkers:
    """A small pool of threads: long enough for disk and vector arithmetic, too small to crowd out the trainer."""

    def __init__(self, threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="p2pnode-worker")

    async def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class Log(Protocol):
    """Structured events: a constant name and fields. An event is logged when something changes, not while it lasts."""

    def debug(self, event: str, **fields: Any) -> None: ...

    def info(self, event: str, **fields: Any) -> None: ...

    def warning(self, event: str, **fields: Any) -> None: ...

    def error(self, event: str, **fields: Any) -> None: ...
