"""Sends what waits for shards to the owners of these: one request per shard at a time, a few to each owner.

What comes while a request is under way goes with the next one (`training.exchange.staggered`), so that many small
requests become few. A shard that was not answered rests for a moment, while the directory looks for its owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from overlay.peers import Contact
from overlay.transport import TransportError
from training.exchange.context import ExchangeContext
from training.exchange.directory import OwnerDirectory
from training.exchange.shard_tasks import ShardTasks
from training.exchange.staggered import Staggered

#: Requests under way to one owner.
REQUESTS_AT_ONCE = 3
FIRST_RETRY_S, MAX_RETRY_S = 0.02, 0.5

#: Sends what waits for these shards of one owner, and returns those that are to be sent again after a rest. Raises
#: `TransportError`.
Send = Callable[[Contact, list[int]], Awaitable[list[int]]]


class OwnerPump(ShardTasks):
    """`waiting` gives the shards for which something waits; `send` is called for those of one owner."""

    def __init__(
        self, context: ExchangeContext, directory: OwnerDirectory, waiting: Callable[[], Iterable[int]], send: Send
    ) -> None:
        super().__init__("owner-request", context.environment.log)
        self._context = context
        self._directory = directory
        self._waiting = waiting
        self._send = send
        self._clock = context.environment.clock
        self._requests = Staggered(REQUESTS_AT_ONCE)
        #: How long each shard that was not answered rests next time.
        self._pauses: dict[int, float] = {}

    def begin(self) -> None:
        shards = [shard for shard in self._waiting() if shard not in self.busy]
        if not shards:
            return
        groups, unknown = self._directory.by_owner(shards)
        now_s = self._clock.monotonic()
        for owner, theirs in groups:
            if wait_s := self._requests.wait_s(owner.node_id, now_s):
                self.wake_after(wait_s)
            else:
                self.start(theirs, partial(self._request, owner, theirs))
        if unknown:
            self.start(unknown, partial(self._rest, unknown))

    async def _request(self, owner: Contact, shards: list[int]) -> None:
        began_s = self._requests.begin(owner.node_id, self._clock.monotonic())
        again: list[int] = []
        try:
            again = await self._send(owner, shards)
        except TransportError as error:
            again = shards
            self._directory.failed(owner, error)
        finally:
            self._requests.end(owner.node_id, began_s)
            answered = [shard for shard in shards if shard not in again]
            for shard in answered:
                self._pauses.pop(shard, None)
            self.free(answered)
        if again:
            await self._rest(again)

    async def _rest(self, shards: list[int]) -> None:
        """Let shards wait, and look for their owners."""
        pause_s = max(self._pauses.get(shard, FIRST_RETRY_S) for shard in shards)
        try:
            await asyncio.sleep(pause_s * self._context.jitter())
            await self._directory.refresh(shards)
        finally:
            for shard in shards:
                self._pauses[shard] = min(2 * pause_s, MAX_RETRY_S)
            self.free(shards)
