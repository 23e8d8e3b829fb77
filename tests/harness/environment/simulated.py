"""The environment of a simulated node: clock, entropy, disk, executor and log, with the faults that tests inject.

Nothing here touches the machine. The clock is the virtual loop's. The disk is a dictionary that outlives its node.
Functions for the executor run inline. The log is a list whose digest identifies a history.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import random
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, ParamSpec, TypeVar

from p2pnode.overlay.environment import Clock, Disk, Entropy, Environment, Executor, Log
from tests.harness.environment.virtual_loop import START_S

P = ParamSpec("P")
R = TypeVar("R")

#: 2026-01-01 00:00 UTC: the wall time at which every simulated world begins.
EPOCH_S = 1_767_225_600.0


class VirtualClock:
    """The virtual loop's time. `skew_s` shifts the wall clock and may be changed at any moment."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None, skew_s: float = 0.0) -> None:
        self._loop = loop or asyncio.get_running_loop()
        self.skew_s = skew_s

    def monotonic(self) -> float:
        return self._loop.time()

    def wall(self) -> float:
        return EPOCH_S + self._loop.time() - START_S + self.skew_s


class SeededEntropy:
    """Randomness from a seed (a number or a text such as "7/node-3"). Tokens have their own stream, so that one more
    nonce does not change what is sampled."""

    def __init__(self, seed: int | str) -> None:
        # Seeded with text: Random hashes it with SHA-512, whatever PYTHONHASHSEED is.
        self._random = random.Random(f"{seed}/random")
        self._tokens = random.Random(f"{seed}/token")

    @property
    def random(self) -> random.Random:
        return self._random

    def token(self, size_bytes: int) -> bytes:
        return self._tokens.randbytes(size_bytes)


class MemoryFile:
    """A new file on a `MemoryDisk`: the disk has it with `commit`, by its own `write`."""

    def __init__(self, disk: MemoryDisk, name: str) -> None:
        self._disk = disk
        self._name = name
        self._parts: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._disk.full:
            raise OSError(errno.ENOSPC, "No space left on device", self._name)
        self._parts.append(bytes(data))

    def commit(self) -> None:
        self._disk.write(self._name, b"".join(self._parts))

    def discard(self) -> None:
        self._parts.clear()


class MemoryDisk:
    """A disk in memory. Writes are atomic and survive a crash: give the same object to the restarted node.

    Faults: `full = True` (every write raises ENOSPC), `unreadable` (names whose reading raises EACCES), `tear`.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.private: dict[str, bool] = {}
        self.full = False
        self.unreadable: set[str] = set()
        self.writes = 0

    def read(self, name: str) -> bytes | None:
        if name in self.unreadable:
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return self.files.get(name)

    def write(self, name: str, data: bytes, *, private: bool = False, is_synced: bool = True) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device", name)
        self.files[name] = bytes(data)
        self.private[name] = private
        self.writes += 1

    def create(self, name: str) -> MemoryFile:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device", name)
        return MemoryFile(self, name)

    def size(self, name: str) -> int | None:
        return len(self.files[name]) if name in self.files else None

    def read_at(self, name: str, offset: int, size_bytes: int) -> bytes:
        raw = self.read(name)
        if raw is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        return raw[offset : offset + size_bytes]

    def remove(self, name: str) -> None:
        self.files.pop(name, None)
        self.private.pop(name, None)

    def names(self, folder: str = "") -> list[str]:
        prefix = folder.rstrip("/") + "/" if folder else ""
        return sorted(name for name in self.files if name.startswith(prefix))

    def tear(self, name: str, keep_bytes: int | None = None) -> None:
        """Truncate a file, by default to half of it: what a power cut leaves of a file that was not synced."""
        data = self.files[name]
        self.files[name] = data[: len(data) // 2 if keep_bytes is None else keep_bytes]


class InlineExecutor:
    """Runs the function on the loop. It suspends before and after, as a real pool does, so that others may run in
    between; `delay_s` is the virtual time the work takes."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s

    async def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        await asyncio.sleep(self.delay_s)
        result = function(*args, **kwargs)
        await asyncio.sleep(0)
        return result

    def pause(self) -> None:
        """There is no loop beside it."""


class NoLog:
    """A log that keeps nothing."""

    def debug(self, event: str, **fields: Any) -> None:
        pass

    info = warning = error = debug


def make_environment(
    *,
    clock: Clock | None = None,
    entropy: Entropy | None = None,
    disk: Disk | None = None,
    executor: Executor | None = None,
    log: Log | None = None,
) -> Environment:
    """An environment in memory, from these parts and defaults for the rest; call it on the virtual loop, or bring a
    clock."""
    return Environment(
        clock=clock or VirtualClock(),
        entropy=entropy or SeededEntropy(0),
        disk=disk or MemoryDisk(),
        executor=executor or InlineExecutor(),
        log=log or NoLog(),
    )


class Record(NamedTuple):
    """One event of a history; `t` is virtual seconds since the start."""

    t: float
    node: str
    level: str
    event: str
    fields: dict[str, Any]


def digest(records: Iterable[Record]) -> str:
    """Hex SHA-256 of a history: equal digests mean the same events at the same times in the same order."""
    hashed = hashlib.sha256()
    for record in records:
        hashed.update(repr(tuple(record)).encode())
    return hashed.hexdigest()


class ListLog:
    """A node's log in a world: appends to the list that all nodes of the world share."""

    def __init__(self, records: list[Record], node: str = "", clock: VirtualClock | None = None) -> None:
        self.records = records
        self.node = node
        self._clock = clock or VirtualClock()

    def _add(self, level: str, event: str, fields: dict[str, Any]) -> None:
        self.records.append(Record(self._clock.monotonic() - START_S, self.node, level, event, fields))

    def debug(self, event: str, **fields: Any) -> None:
        self._add("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._add("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._add("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._add("error", event, fields)

    def of(self, event: str) -> list[Record]:
        """The records of one event, of every node."""
        return [record for record in self.records if record.event == event]

    def digest(self) -> str:
        return digest(self.records)
