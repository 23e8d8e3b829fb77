"""The environment of a node: clock, entropy, disk, executor and log, each a small interface.

Pure modules never use these: they get `now`, a `random.Random` and bytes. Services get one `Environment` from the
composition root. The simulated network passes a virtual clock, seeded entropy, a disk with torn writes, and an
executor that runs inline; `overlay.system` has the real ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Clock(Protocol):
    """`monotonic` is the time of the running loop, in seconds; `wall` is seconds since 1970 and may jump.

    Waiting is `asyncio.sleep` and `asyncio.timeout`: under simulation the loop itself is virtual.
    """

    def monotonic(self) -> float: ...

    def wall(self) -> float: ...


class Entropy(Protocol):
    """Randomness. `random` is for sampling and jitter; `token` is for keys, nonces and message ids."""

    @property
    def random(self) -> random.Random: ...

    def token(self, size_bytes: int) -> bytes: ...


class NewFile(Protocol):
    """A file that is written piece by piece. It appears under its name with `commit`, whole and synced, and replaces
    the former one. Every method may raise `OSError`; then call `discard`."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append a piece: contiguous memory of any type, not kept."""
        ...

    def commit(self) -> None: ...

    def discard(self) -> None:
        """Leave no trace of it; does nothing after `commit`. Raises nothing."""
        ...


class Disk(Protocol):
    """The state directory of a node. Files have relative names such as `identity.key` or `checkpoint/step-40.json`.

    Synchronous: call it through `Executor.run` when the data is large or must be synced.
    """

    def read(self, name: str) -> bytes | None:
        """The whole content, or None where there is no such file. `OSError` when it cannot be read."""
        ...

    def write(self, name: str, data: bytes, *, private: bool = False, is_synced: bool = True) -> None:
        """Replace the file whole or not at all, synced to disk. `private` makes it readable by the owner only. What is
        not synced outlives this process, but not the machine."""
        ...

    def create(self, name: str) -> NewFile:
        """Begin a large file, which need not be in memory as a whole. Raises `OSError`."""
        ...

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is no such file."""
        ...

    def read_at(self, name: str, offset: int, size_bytes: int) -> bytes:
        """A piece of a file, shorter at its end. `OSError` when it cannot be read."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file; a missing one is not an error."""
        ...

    def names(self, folder: str = "") -> list[str]:
        """Sorted relative names of the files under a folder."""
        ...


class Executor(Protocol):
    """Runs a synchronous function off the loop. Long work must release the GIL, or the loop stalls all the same."""

    async def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def pause(self) -> None:
        """Called by such a function between its parts: the loop may have the core."""


class Log(Protocol):
    """Structured events: a constant name and fields. An event is logged when something changes, not while it lasts."""

    def debug(self, event: str, **fields: Any) -> None: ...

    def info(self, event: str, **fields: Any) -> None: ...

    def warning(self, event: str, **fields: Any) -> None: ...

    def error(self, event: str, **fields: Any) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What every service of a node may need of the machine, as one parameter."""

    clock: Clock
    entropy: Entropy
    disk: Disk
    executor: Executor
    log: Log
