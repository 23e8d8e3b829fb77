"""What keeps the queue: rows, written together or not at all, by one master at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from p2pnode.training.errors import TrainingError

#: Of one write: etcd takes 128 operations and 1.5 MiB, of which its JSON coding takes a quarter and the store itself
#: one row.
MAX_ROWS = 127
MAX_BYTES = 1 << 20


class StoreRefused(TrainingError):
    """Nothing has happened: the request may be repeated. The text says why."""


class StoreLost(TrainingError):
    """This master no longer writes to the store, or does not know what it has written: it must stop serving at once and
    open the store anew. The text says what happened and what to do."""


class StoreHeld(TrainingError):
    """Another master has the store; the text names it as far as it is known."""


class Store(Protocol):
    """One per master. After `StoreLost` only `close` may be called."""

    @property
    def epoch(self) -> int:
        """Rises with every `open` of any master: the newest master has the highest."""
        ...

    async def open(self) -> dict[str, bytes]:
        """Become the one writer and read all rows. Where another master may be waited for, this waits.

        Raises `StoreHeld` where waiting is of no use, `StoreLost` where the store cannot be opened or read.
        """
        ...

    def check(self) -> None:
        """Raise `StoreLost` unless this master is the one writer now, by its own clock. Does no I/O."""
        ...

    async def write(self, rows: Mapping[str, bytes]) -> None:
        """Write or replace these rows, at most `MAX_ROWS` of `MAX_BYTES` together: all, durably, or none. One call at a
        time. Raises `StoreLost`."""
        ...

    async def close(self) -> None:
        """Give the store up to others. Raises nothing, may be called again."""
        ...
