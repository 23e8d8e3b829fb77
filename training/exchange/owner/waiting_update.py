"""An update of a named value on its way into a shard, and the requests that wait for what becomes of it.

A request has many updates, and a repeated one shares its updates with the first. So an update tells its requests
itself: a future for each update would cost the loop a callback and a turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from training.exchange.messages import PushResult
from training.shards.applied import DeltaId
from training.shards.value_batch import KeyUpdate


class Waiting:
    """`is_repair`: the other side of a split has acknowledged it. `is_alone`: it, or one that it was with, has raised
    in `pull`; it is given to it by itself. `result` is None until it is settled."""

    __slots__ = (
        "_listeners",
        "identity",
        "is_alone",
        "is_repair",
        "result",
        "sender",
        "since_s",
        "size_bytes",
        "update",
    )

    def __init__(
        self, update: KeyUpdate, identity: DeltaId, since_s: float, sender: bytes, *, is_repair: bool = False
    ) -> None:
        self.update = update
        self.size_bytes = update.size_bytes
        self.identity = identity
        self.since_s = since_s
        self.sender = sender
        self.is_repair = is_repair
        self.is_alone = False
        self.result: PushResult | None = None
        self._listeners: list[Callable[[], None]] = []

    def settle(self, result: PushResult) -> None:
        """Give it its result, once."""
        if self.result is None:
            self.result = result
            listeners, self._listeners = self._listeners, []
            for call in listeners:
                call()

    def listen(self, call: Callable[[], None]) -> None:
        """Call this when it is settled."""
        self._listeners.append(call)

    def forget(self, call: Callable[[], None]) -> None:
        """Do not call this any more."""
        if call in self._listeners:
            self._listeners.remove(call)


async def all_settled(waiting: Sequence[Waiting], timeout_s: float) -> None:
    """Return when each of these is settled, or after a time."""
    left = [one for one in dict.fromkeys(waiting) if one.result is None]
    if not left:
        return
    loop = asyncio.get_running_loop()
    is_over: asyncio.Future[None] = loop.create_future()
    count = len(left)

    def on_settled() -> None:
        nonlocal count
        count -= 1
        if not count:
            end()

    def end() -> None:
        if not is_over.done():
            is_over.set_result(None)

    for one in left:
        one.listen(on_settled)
    timer = loop.call_later(timeout_s, end)
    try:
        await is_over
    finally:
        timer.cancel()
        if count:
            for one in left:
                one.forget(on_settled)
