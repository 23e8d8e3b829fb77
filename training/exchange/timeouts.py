"""How long a request and a step wait: as long as something moves; and what is in the way of shards that do not come.

The timeout of a request bounds silence, not the transfer: a slow link that delivers bytes is waited for, and a response
time begins when the peer has the request. It follows the response times of that peer for that kind of request
(`overlay.waits`), between a floor and a ceiling. After a timeout the next one is longer (RFC 6298 section 5.5): the
peer, or the queue before a slow line, may have become slower than any measurement. It stays longer until answers come
that a shorter one would have got. So the ceiling bounds the first silence, by which a dead node is found, and no longer
one for a peer that is suspected or dead.

A step waits for many shards from several nodes at once. The wait is over when for its limit no byte of any transfer has
moved, and no answer has come. So a node that sends nothing holds no step longer than the limit after the others are
done. Bytes that were lost with a failed request and are sent again are no progress until there are more than before.
Otherwise a stopped process, whose kernel takes a few bytes of each attempt, would hold the step for as long as it is
stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from p2pnode.overlay.peers import Contact
from p2pnode.overlay.waits import RoundTrips, Silence


class StepWait:
    """What one step waits for. `limit_s` None: without limit. Its times are those of the event loop, as its timers'."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        #: What has moved: bytes, and one for each answer.
        self._moved = 0
        #: The transfers in progress, and the most bytes of each that have moved over all attempts.
        self._transfers: dict[int, tuple[Hashable, Callable[[], int]]] = {}
        self._most_bytes: dict[Hashable, int] = {}
        self._count = 0

    def note(self) -> None:
        """Something was answered."""
        self._moved += 1

    @contextmanager
    def watching(self, key: Hashable, moved_bytes: Callable[[], int]) -> Iterator[None]:
        """While the block runs, more bytes of this transfer than in any earlier one with the same key are movement."""
        self._count += 1
        number = self._count
        self._transfers[number] = key, moved_bytes
        try:
            yield
        finally:
            self._look(*self._transfers.pop(number))

    def _look(self, key: Hashable, moved_bytes: Callable[[], int]) -> None:
        before = self._most_bytes.get(key, 0)
        if (moved := moved_bytes()) > before:
            self._most_bytes[key] = moved
            self._moved += moved - before

    async def until(self, done: asyncio.Future[Any]) -> bool:
        """Wait for `done`, which is neither cancelled nor asked for its result; False if it was silent for too long
        before."""
        if self._limit_s is None:
            await asyncio.wait([done])
            return True
        now = asyncio.get_running_loop().time
        silence = Silence(self._limit_s, now(), self._moved)
        while not done.done():
            for transfer in list(self._transfers.values()):
                self._look(*transfer)
            if not (left_s := silence.look(now(), self._moved)):
                return False
            await asyncio.wait([done], timeout=left_s)
        return True


async def together(works: Iterable[Awaitable[None]]) -> None:
    """Run all of these until they are done; if one raises, the others are cancelled before its error goes on."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Obstacle(NamedTuple):
    """Since when requests for a shard were in vain, in monotonic seconds; the owner that was asked last, None where
    none is known; and why."""

    since_s: float
    owner: Contact | None
    reason: str


class Obstacles:
    """Of the shards for which one node asks."""

    def __init__(self) -> None:
        self._found: dict[int, Obstacle] = {}

    def note(self, shards: Iterable[int], owner: Contact | None, reason: str, asked_s: float) -> None:
        """A request for these shards, made at this moment, was in vain."""
        for shard in shards:
            former = self._found.get(shard)
            self._found[shard] = Obstacle(asked_s if former is None else former.since_s, owner, reason)

    def clear(self, shard: int) -> None:
        """It has come, or was taken."""
        self._found.pop(shard, None)

    def __contains__(self, shard: int) -> bool:
        return shard in self._found

    def since(self, before_s: float) -> dict[Obstacle, int]:
        """What has been in the way since then or longer, by owner and reason, with the number of shards; the longest
        first. `since_s` is that of the shard that has waited longest."""
        found: dict[tuple[bytes, str], tuple[Obstacle, int]] = {}
        for one in sorted(self._found.values(), key=lambda one: one.since_s):
            if one.since_s <= before_s:
                key = b"" if one.owner is None else one.owner.node_id, one.reason
                longest, count = found.get(key, (one, 0))
                found[key] = longest, count + 1
        return dict(found.values())


Kind = Literal["push", "pull", "forward", "state", "fetch", "request_repair", "repair", "question"]

#: Pairs of kind and peer kept; the one that was used longest ago is dropped.
MAX_KEYS = 1024
#: Each timeout in a row makes the next one longer by this factor, up to this one in all.
BACKOFF, MAX_BACKOFF = 1.5, 8.0


class Range(NamedTuple):
    """Seconds: before anything is measured, at least, and at most."""

    first_s: float
    floor_s: float
    ceiling_s: float


#: With this ceiling detection, take-over and first answer stay within the detection bound of 10 s.
REQUEST = Range(3.0, 2.0, 4.5)
#: Below the floor of every request: an owner that waits for its backup answers `retry` before its callers time out.
FORWARD = Range(1.5, 0.75, 1.75)
#: A small question that is answered at once. Behind a full line its answer takes as long as the queues are.
QUESTION = Range(1.0, 1.0, 4.5)

_LIMITS: dict[Kind, Range] = {"forward": FORWARD, "question": QUESTION}


class _Times(RoundTrips):
    """The response times of one peer to one kind of request."""

    __slots__ = ("backoff",)

    def __init__(self) -> None:
        super().__init__()
        self.backoff = 1.0

    def within(self, limits: Range) -> float:
        """The timeout without the silences of late."""
        return min(max(limits.floor_s, self.timeout_s(limits.first_s)), limits.ceiling_s)


class AdaptiveTimeouts:
    """The timeouts of the requests of one node."""

    def __init__(self) -> None:
        self._times: dict[tuple[Kind, bytes], _Times] = {}

    def timeout_s(self, kind: Kind, peer: bytes, *, is_suspect: bool = False) -> float:
        """Seconds of silence after which a request of this kind to this peer has failed. One that the failure detector
        suspects or has found dead is about to be replaced."""
        limits, times = _LIMITS.get(kind, REQUEST), self._times.get((kind, peer))
        if times is None:
            return limits.first_s
        seconds = times.within(limits) * times.backoff
        # Promise 3 (docs/faults.md): nobody waits for a suspect as long as for others.
        return min(seconds, limits.ceiling_s) if is_suspect else seconds

    def on_response(self, kind: Kind, peer: bytes, seconds: float) -> None:
        """The answer began so many seconds after the last byte of the request had arrived."""
        times = self._of(kind, peer)
        if seconds <= times.within(_LIMITS.get(kind, REQUEST)):
            times.backoff = max(1.0, times.backoff / BACKOFF)
        times.observe(seconds)

    def on_timeout(self, kind: Kind, peer: bytes) -> None:
        """The timeout passed without an answer."""
        times = self._of(kind, peer)
        times.backoff = min(times.backoff * BACKOFF, MAX_BACKOFF)

    def _of(self, kind: Kind, peer: bytes) -> _Times:
        key = kind, peer
        times = self._times[key] = self._times.pop(key) if key in self._times else _Times()
        if len(self._times) > MAX_KEYS:
            del self._times[next(iter(self._times))]
        return times
