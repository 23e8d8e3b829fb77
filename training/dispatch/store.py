"""What keeps the queue: a list of chunks, a snapshot and a log of entries, written by one master at a time.

Each entry of the log is written whole or not at all, is durable when `append` returns, and is numbered from 1 without
gaps. `MemoryStore` keeps everything in memory, for tests and for a run whose master need not survive.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from training.errors import TrainingError

#: Larger entries are refused: below etcd's default limit of 1.5 MiB with all that a request adds.
MAX_ENTRY_BYTES = 1 << 20


class StoreRefused(TrainingError):
    """Nothing was written, memory and store are as before: the request may be repeated. The text says why."""


class StoreLost(TrainingError):
    """This master no longer writes to the store, or does not know what it has written: it must stop serving at once and
    open the store anew. The text says what happened and what to do."""


class StoreHeld(TrainingError):
    """Another master has the store; the text names it as far as it is known."""


@dataclass(frozen=True, slots=True)
class StoredQueueState:
    """What a store had when it was opened: `entries` follow the snapshot, in order."""

    chunks: bytes | None
    snapshot: bytes | None
    entries: tuple[bytes, ...]


class Store(Protocol):
    """One per master. After `StoreLost` only `close` may be called."""

    @property
    def epoch(self) -> int:
        """Rises with every `open` of any master: the newest master has the highest."""
        ...

    async def open(self) -> StoredQueueState:
        """Become the one writer and read everything. Where another master may be waited for, this waits.

        Raises `StoreHeld` where waiting is of no use, `StoreLost` where the store cannot be opened or read.
        """
        ...

    def check(self) -> None:
        """Raise `StoreLost` unless this master is the one writer now, by its own clock. Does no I/O."""
        ...

    async def append(self, entry: bytes) -> None:
        """Write the next entry of the log. Raises `StoreRefused` or `StoreLost`."""
        ...

    async def write_chunks(self, chunks: bytes) -> None:
        """Write the list of chunks, before the entry that registers it. Replaces one that no entry refers to."""
        ...

    async def write_snapshot(self, snapshot: bytes, entries: int) -> None:
        """Replace the snapshot and drop the first `entries` entries of the log, which it includes. All or nothing:
        the snapshot and the entries after it are consistent whenever the store is opened."""
        ...

    async def close(self) -> None:
        """Give the store up to others. Raises nothing, may be called again."""
        ...


@dataclass(slots=True)
class StoreContents:
    """What a `MemoryStore` keeps, outside of it: several stores on one object are masters of one queue."""

    chunks: bytes | None = None
    snapshot: bytes | None = None
    entries: list[bytes] = field(default_factory=list)
    epoch: int = 0
    #: Until when nobody else may become the writer, on the clock of the loop.
    held_until: float = 0.0


class MemoryStore:
    """Keeps the queue in this process. With `lease_s` 0 the newest of several on one `StoreContents` is the writer;
    otherwise `open` waits for the lease of the former writer, which `check` renews, to end."""

    def __init__(self, contents: StoreContents | None = None, lease_s: float = 0.0) -> None:
        self.contents = contents or StoreContents()
        self.epoch = 0
        self._lease_s = lease_s

    async def open(self) -> StoredQueueState:
        kept, loop = self.contents, asyncio.get_running_loop()
        while (left_s := kept.held_until - loop.time()) > 0:  # noqa: ASYNC110  the lease may be renewed meanwhile
            await asyncio.sleep(left_s)
        kept.epoch += 1
        self.epoch = kept.epoch
        kept.held_until = loop.time() + self._lease_s
        return StoredQueueState(kept.chunks, kept.snapshot, tuple(kept.entries))

    def check(self) -> None:
        kept = self.contents
        if self.epoch != kept.epoch:
            raise StoreLost("another master has opened the store")
        if self._lease_s:
            now = asyncio.get_running_loop().time()
            if now >= kept.held_until:
                raise StoreLost("the lease on the store has ended")
            kept.held_until = now + self._lease_s

    async def append(self, entry: bytes) -> None:
        self.check()
        if len(entry) > MAX_ENTRY_BYTES:
            raise StoreRefused(f"an entry of {len(entry)} bytes is larger than {MAX_ENTRY_BYTES}")
        self.contents.entries.append(entry)

    async def write_chunks(self, chunks: bytes) -> None:
        self.check()
        self.contents.chunks = chunks

    async def write_snapshot(self, snapshot: bytes, entries: int) -> None:
        self.check()
        self.contents.snapshot = snapshot
        del self.contents.entries[:entries]

    async def close(self) -> None:
        if self.epoch == self.contents.epoch:
            self.contents.held_until = 0.0
        self.epoch = -1
