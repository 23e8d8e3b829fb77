"""What waits to be handed on: shards of deltas, in a queue for each next node."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from overlay.peers import Contact
from training.exchange.aggregation.bundles import MAX_BUNDLE_BYTES, MAX_PUSHES, Carried
from training.exchange.messages import Push, PushResult

#: Hears of results; without any, that somebody is at work.
Note = Callable[[list[PushResult]], None]


class Unanswered:
    """The shards of one delta that have no answer yet."""

    def __init__(self, shards: Iterable[int], note: Note) -> None:
        self._left = dict.fromkeys(shards)
        self._note = note
        self.done = asyncio.Event()
        if not self._left:
            self.done.set()

    @property
    def is_closed(self) -> bool:
        """Whether nobody waits any more."""
        return self.done.is_set()

    def close(self) -> None:
        self._left.clear()
        self.done.set()

    def answer(self, results: Iterable[PushResult]) -> None:
        """The first answer of each shard counts."""
        fresh = []
        for result in results:
            if result.shard in self._left:
                del self._left[result.shard]
                fresh.append(result)
        if fresh:
            self._note(fresh)
        if not self._left:
            self.done.set()

    def sign_of_life(self) -> None:
        if self._left:
            self._note([])


@dataclass(slots=True)
class Consignment:
    """Some shards of one delta for the same next node. `hops`: how many nodes it has passed."""

    push: Push
    items: list[Carried]
    hops: int
    unanswered: Unanswered

    @property
    def size_bytes(self) -> int:
        return sum(len(item.encoded) for item in self.items)

    def answer(self, results: Iterable[PushResult]) -> None:
        """Answers about other shards than these do not count."""
        mine = {item.shard for item in self.items}
        self.unanswered.answer(result for result in results if result.shard in mine)

    def give_up(self) -> None:
        """The origin is to send to the owners itself."""
        self.unanswered.answer(PushResult.retry(item.shard, "not_relayed") for item in self.items)


@dataclass(slots=True)
class Way:
    """What waits for one next node."""

    to: Contact
    waiting: deque[Consignment] = field(default_factory=deque)
    task: asyncio.Task[None] | None = None

    def give_up(self) -> None:
        while self.waiting:
            self.waiting.popleft().give_up()

    def take(self) -> list[Consignment]:
        """The oldest ones, as many as one bundle has room for."""
        taken: list[Consignment] = []
        size = 0
        while self.waiting and len(taken) < MAX_PUSHES:
            first = self.waiting[0]
            if first.unanswered.is_closed:
                self.waiting.popleft()
                continue
            size += first.size_bytes
            if taken and size > MAX_BUNDLE_BYTES:
                break
            taken.append(self.waiting.popleft())
        return taken
