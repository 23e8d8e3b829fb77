"""How long a step waits for its shards: as long as one of them moves. Pure.

A step waits for many shards from several nodes at once. Each shard has its own silence: it begins with the wait, and
anew whenever a byte of the transfer that carries the shard has moved, or an answer for one of them has come. The wait
is over when every shard that is still awaited has been silent for the limit. So a dead node does not hold the step
longer than the limit, however long the others take; and a line that is slow but moves ends no wait.

Bytes that were lost with a failed request and are sent again are no progress until there are more than before.
Otherwise a stopped process, whose kernel takes a few bytes of each attempt, would hold the step for as long as it is
stopped. Nor is it movement where fewer than `LEAST_BYTES_PER_S` come: no line is that slow.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

#: A hundredth of the slowest capacity class. A member that sends a byte a second does so to hold others up.
LEAST_BYTES_PER_S = 80.0


class Patience:
    """The silence of each shard that one step waits for. Times are monotonic seconds."""

    def __init__(self, limit_s: float, now_s: float) -> None:
        self.limit_s = limit_s
        self._began_s = now_s
        self._moved_s: dict[int, float] = {}
        #: Most bytes of a transfer that have moved so far, over all attempts.
        self._most_bytes: dict[Hashable, int] = {}

    def note(self, shards: Iterable[int], now_s: float) -> None:
        """Something of these shards has arrived, or was answered."""
        for shard in shards:
            self._moved_s[shard] = now_s

    def note_bytes(self, transfer: Hashable, shards: Iterable[int], moved_bytes: int, now_s: float) -> None:
        """So many bytes of a transfer that carries these shards have moved in its present attempt."""
        shards = list(shards)
        last_s = max((self._moved_s.get(shard, self._began_s) for shard in shards), default=now_s)
        if moved_bytes > self._most_bytes.get(transfer, 0) + LEAST_BYTES_PER_S * (now_s - last_s):
            self._most_bytes[transfer] = moved_bytes
            self.note(shards, now_s)

    def left_s(self, awaited: Iterable[int], now_s: float) -> float:
        """Seconds until every awaited shard has been silent for the limit, if nothing moves; 0: the wait is over."""
        last_s = max((self._moved_s.get(shard, self._began_s) for shard in awaited), default=self._began_s)
        left_s = last_s + self.limit_s - now_s
        # Less is not worth another timer, and too little for one to move the clock.
        return left_s if left_s > self.limit_s / 1000 else 0.0
