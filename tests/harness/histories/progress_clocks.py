"""Clocks that tell whether anybody stands still: of acknowledged deltas and of fresh values, not of steps.

A node that trains has two clocks for each shard. One is set by every acknowledgement of a delta of its own for that
shard, the other when a pull has brought other bits of it. Steps show nothing: a node counts them while its deltas wait
in the outbox and its pulls bring nothing.

No fault sets a clock. A clock may show the sum of three times: the detection bound (detection, take-over and first
answer, docs/faults.md), the longest step, and requests that are lost in a row (`retries_s`). A node waits 5 s for
acknowledgements and 5 s for values, so that the bound holds for every shard. For each further fault since it was set a
clock may show the bound once more, if that fault can stop this node or this shard. Such a fault strikes the node, or
the owner, the backup or the learner of the shard, or cuts lines between them. A fault elsewhere allows nothing, and
neither does a join or an orderly leave.

A fault elsewhere may have held up the exchange that set a clock, or the one under way: its node waited for other
shards, and pushed nothing. Where a fault strikes such a clock too, what the other shards took comes on top of the
bound.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.exchange.directory import MAX_RETRY_S
from p2pnode.training.exchange.timeouts import BACKOFF, QUESTION, REQUEST

#: The detection bound (docs/faults.md), and the slowest step of a simulated worker.
BOUND_S = 10.0
STEP_MOST_S = 3.0
#: What happens to fewer than one request in so many is bad luck. It would have to meet a take-over that takes its full
#: bound, and in 200 histories it did not.
RARE = 500


def retries_s(loss: float, rare: float = RARE) -> float:
    """The time that requests which are lost in a row take, where the links lose this share of the messages.

    A request fails when it is lost or its answer is: with probability 1 - (1 - loss)². Of one in `rare` requests so
    many attempts fail; without loss it is one, which was slow. The first times out after the floor of a request, each
    further one after `BACKOFF` times as long, and before each attempt there is a pause. Once the look for the owner
    is lost too. The result is 3.5 s without loss, 7 s at 1 % and 12 s at 5 %.
    """
    fails = 1.0 - (1.0 - loss) ** 2
    lost = max(1, math.ceil(math.log(rare) / -math.log(fails))) if fails else 1
    return QUESTION.first_s + sum(REQUEST.floor_s * BACKOFF**attempt + MAX_RETRY_S for attempt in range(lost))


@dataclass
class Clock:
    """`since_s`: when a node last got what it waits for. `held_s`: how long that exchange waited for other shards."""

    since_s: float
    blows: int = 0
    held_s: float = 0.0


class ProgressClocks:
    """The clocks of all nodes that train."""

    def __init__(self, shards: int, loss: float = 0.0, rare: float = RARE) -> None:
        """`loss`: the share of the messages that the links lose. `rare`: of how many requests one may have no luck."""
        self._shards = shards
        self._retries_s = retries_s(loss, rare)
        self._acknowledged: dict[str, list[Clock]] = {}
        self._fresh: dict[str, list[Clock]] = {}
        self._seen: dict[str, Vector] = {}
        #: When the exchange of a node began that has not ended.
        self._under_way: dict[str, float] = {}
        #: The longest that a clock has shown, and the same of clocks that at most one fault had struck, without the
        #: time for other shards.
        self.longest_s = 0.0
        self.longest_of_one_s = 0.0

    def limit_s(self, faults: int = 1, held_s: float = 0.0) -> float:
        """What a clock may show that so many faults have struck, and whose node waited so long for other shards."""
        return STEP_MOST_S + self._retries_s + max(BOUND_S, BOUND_S * faults + min(BOUND_S, held_s))

    def names(self) -> list[str]:
        return list(self._acknowledged)

    def start(self, name: str, now: float, replica: Vector) -> None:
        """A node begins to train."""
        self._acknowledged[name] = [Clock(now) for _ in range(self._shards)]
        self._fresh[name] = [Clock(now) for _ in range(self._shards)]
        self._seen[name] = replica.copy()

    def stop(self, name: str) -> None:
        """It was killed, or trains no more."""
        for clocks in (self._acknowledged, self._fresh, self._under_way):
            clocks.pop(name, None)

    def acknowledged(self, name: str, shard: int, now: float) -> None:
        if name in self._acknowledged:
            self._acknowledged[name][shard] = self._read(self._acknowledged[name][shard], now)

    def exchanging(self, name: str, now: float) -> None:
        """An exchange begins."""
        self._under_way[name] = now

    def exchanged(self, name: str, began_s: float, missing: Collection[int], now: float) -> None:
        """An exchange has ended, for which these shards did not come. Those that were acknowledged in it did not hold
        it up."""
        self._under_way.pop(name, None)
        for shard, clock in enumerate(self._acknowledged.get(name, ())):
            if clock.since_s >= began_s and shard not in missing:
                clock.held_s = now - clock.since_s

    def pulled(self, name: str, replica: Vector, bounds: list[tuple[int, int]], now: float) -> None:
        """A pull has ended: the shards whose bits are others are fresh."""
        if name not in self._fresh:
            return
        seen = self._seen[name]
        for shard, (start, stop) in enumerate(bounds):
            if (seen[start:stop] != replica[start:stop]).any():
                self.fresh(name, shard, now)
                seen[start:stop] = replica[start:stop]

    def fresh(self, name: str, shard: int, now: float) -> None:
        """A pull has brought a node another value of a shard."""
        if name in self._fresh:
            self._fresh[name][shard] = self._read(self._fresh[name][shard], now)

    def struck(self, names: Iterable[str], shards: Iterable[int], now: float) -> None:
        """A fault that may stop these nodes, and every node at these shards."""
        named, of_shards = dict.fromkeys(names), dict.fromkeys(shards)
        for clocks in (self._acknowledged, self._fresh):
            for name, theirs in clocks.items():
                for shard, clock in enumerate(theirs):
                    if name in named or shard in of_shards:
                        clock.blows += 1
                        clock.held_s = max(clock.held_s, now - self._under_way.get(name, now))

    def late(self, now: float, waiting: dict[str, list[int]] | None = None) -> str:
        """The first clock that shows more than it may; empty if there is none. With `waiting`, nobody trains any more,
        and only these shards of these nodes still wait for an acknowledgement."""
        for what, clocks in (("acknowledged delta", self._acknowledged), ("fresh version", self._fresh)):
            for name, theirs in clocks.items():
                for shard, clock in enumerate(theirs):
                    if waiting is not None and (clocks is self._fresh or shard not in waiting.get(name, ())):
                        continue
                    self._read(clock, now)
                    if now - clock.since_s > self.limit_s(clock.blows, clock.held_s):
                        waited_s, faults = now - clock.since_s, clock.blows
                        return f"{name} stood still for {waited_s:.1f} s: no {what} of shard {shard}, {faults} faults"
        return ""

    def _read(self, clock: Clock, now: float) -> Clock:
        """The clock that follows this one, set now."""
        waited_s = now - clock.since_s
        self.longest_s = max(self.longest_s, waited_s)
        if clock.blows <= 1:
            self.longest_of_one_s = max(self.longest_of_one_s, waited_s - clock.held_s)
        return Clock(now)
