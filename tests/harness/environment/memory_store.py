"""A store of the dispatch queue in memory, outside of which its contents stay: for masters that are killed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from p2pnode.training.dispatch.store import MAX_BYTES, MAX_ROWS, StoreLost


@dataclass(slots=True)
class StoreContents:
    """What a `MemoryStore` keeps: several stores on one object are masters of one queue."""

    rows: dict[str, bytes] = field(default_factory=dict)
    epoch: int = 0
    #: Until when nobody else may become the writer, on the clock of the loop.
    held_until: float = 0.0


class MemoryStore:
    """With `lease_s` 0 the newest of several on one `StoreContents` is the writer; otherwise `open` waits for the lease
    of the former writer, which `check` renews, to end. Implements `Store`."""

    def __init__(self, contents: StoreContents | None = None, lease_s: float = 0.0) -> None:
        self.contents = contents or StoreContents()
        self.epoch = 0
        self._lease_s = lease_s

    async def open(self) -> dict[str, bytes]:
        kept, loop = self.contents, asyncio.get_running_loop()
        while (left_s := kept.held_until - loop.time()) > 0:  # noqa: ASYNC110  the lease may be renewed meanwhile
            await asyncio.sleep(left_s)
        kept.epoch += 1
        self.epoch = kept.epoch
        kept.held_until = loop.time() + self._lease_s
        return dict(kept.rows)

    def check(self) -> None:
        kept = self.contents
        if self.epoch != kept.epoch:
            raise StoreLost("another master has opened the store")
        if self._lease_s:
            now = asyncio.get_running_loop().time()
            if now >= kept.held_until:
                raise StoreLost("the lease on the store has ended")
            kept.held_until = now + self._lease_s

    async def write(self, rows: Mapping[str, bytes]) -> None:
        self.check()
        assert len(rows) <= MAX_ROWS
        assert sum(map(len, rows.values())) <= MAX_BYTES
        self.contents.rows |= rows

    async def close(self) -> None:
        if self.epoch == self.contents.epoch:
            self.contents.held_until = 0.0
        self.epoch = -1
