"""Owners that put this node off: they live and answer, and of a shard comes no result. Pure.

An owner says `retry` or `later` to each attempt, or for ever that it is at work, or it moves a byte a second: none of
it is a lie, and a step that waits for the shard waits for as long as that goes on. Honest owners put off too: while
their backup is replaced, or their line is full. So the measure is what the others do. An owner holds this node up when

* a shard has been asked for without a result for `LEAST_S`, and `FACTOR` times as long as such requests to other owners
  took, as their median;
* and another owner has given results meanwhile: else it would be this node whose line is slow.

Time counts while a request is under way, and up to `GAP_S` between one attempt and the next.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Literal

Asked = Literal["push", "pull"]

LEAST_S, FACTOR = 10.0, 16.0
#: And so many median steps: what a step needs, every owner may take.
STEPS = 4.0
GAP_S = 1.5
#: A request that has been under way for so long is looked at.
LOOK_S = 1.0
#: Owners whose times are remembered; the one that gave a result longest ago is forgotten first.
MAX_OWNERS = 256


@dataclass(slots=True)
class _Wait:
    """Of one shard: by whom it is put off, for how long in all, and when that was counted last. Monotonic seconds."""

    owner: bytes
    since_s: float
    waited_s: float
    last_s: float


@dataclass(frozen=True, slots=True, eq=False)
class _Asking:
    """A request that is under way."""

    kind: Asked
    owner: bytes
    began_s: float
    shards: Collection[int]
    awaited: Container[int]

    def left(self) -> list[int]:
        """The shards without a result."""
        return [shard for shard in self.shards if shard in self.awaited]


class PutOff:
    """What one node waits for."""

    def __init__(self) -> None:
        self._waits: dict[tuple[Asked, int], _Wait] = {}
        self._asking: dict[_Asking, None] = {}
        #: How long the last request of each kind to each owner took that had a result, and when it had.
        self._took: dict[tuple[Asked, bytes], tuple[float, float]] = {}

    @contextmanager
    def asking(
        self, kind: Asked, owner: bytes, shards: Collection[int], awaited: Container[int], now: Callable[[], float]
    ) -> Iterator[None]:
        """While a request for shards is under way; those in `awaited` have no result. `now`: in monotonic seconds."""
        asking = _Asking(kind, owner, now(), shards, awaited)
        self._asking[asking] = None
        try:
            yield
        finally:
            del self._asking[asking]
            self._end(asking, now())

    def _end(self, asking: _Asking, now_s: float) -> None:
        left = asking.left()
        if len(left) < len(asking.shards):
            key = asking.kind, asking.owner
            self._took.pop(key, None)
            self._took[key] = now_s - asking.began_s, now_s
            if len(self._took) > MAX_OWNERS:
                del self._took[next(iter(self._took))]
        if self._waits:
            for shard in asking.shards:
                if shard not in asking.awaited:
                    self._waits.pop((asking.kind, shard), None)
        self._note(asking, left, now_s)

    def _note(self, asking: _Asking, left: Collection[int], now_s: float) -> None:
        for shard in left:
            wait = self._waits.get((asking.kind, shard))
            if wait is None or wait.owner != asking.owner:
                since_s = asking.began_s
                self._waits[asking.kind, shard] = _Wait(asking.owner, since_s, now_s - since_s, now_s)
                continue
            wait.waited_s += min(now_s - wait.last_s, max(GAP_S, now_s - asking.began_s))
            wait.last_s = now_s

    def due(self, now_s: float, step_s: float) -> list[bytes]:
        """The owners that hold this node up; each is named once for a wait. `step_s`: the median step, in seconds."""
        for asking in self._asking:
            if now_s - asking.began_s >= LOOK_S:
                self._note(asking, asking.left(), now_s)
        found: dict[bytes, None] = {}
        others: dict[tuple[Asked, bytes], tuple[float, float]] = {}
        for (kind, shard), wait in list(self._waits.items()):
            if now_s - wait.last_s > GAP_S or wait.waited_s < max(LEAST_S, STEPS * step_s):
                continue  # nobody asks for it now, or not for long
            of = kind, wait.owner
            usual_s, at_s = others.get(of) or others.setdefault(of, self._others(*of))
            if at_s > wait.since_s and wait.waited_s >= FACTOR * usual_s:
                found[wait.owner] = None
                del self._waits[kind, shard]
        return list(found)

    def _others(self, kind: Asked, owner: bytes) -> tuple[float, float]:
        """How long requests of this kind to other owners took, as their median, and when the last one had a result."""
        took = [one for (of, other), one in self._took.items() if of == kind and other != owner]
        return median(seconds for seconds, _ in took) if took else 0.0, max((at_s for _, at_s in took), default=0.0)

    def forget(self, owner: bytes) -> None:
        """An owner is left out, or gone: others are asked."""
        for key in [key for key, wait in self._waits.items() if wait.owner == owner]:
            del self._waits[key]
