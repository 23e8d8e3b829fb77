"""Draws samples of peers: uniform without replacement, biased by id space, or from a node's own pool.

The order in which a stream is consumed is part of the contract with the compiled engine (`engines.kernel`). Small
samples are drawn by rejection, large ones by a partial Fisher-Yates shuffle that is undone afterwards. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from p2pnode.training.simulation.random_streams import POOLS, SAMPLES, WEIGHTS, RandomStream

#: A sample is drawn by rejection if the population is at least this many times as large.
REJECTION = 8

#: Called with each peer drawn; True ends the draw, because the result is known.
Stop = Callable[[int], bool]


class UniformSampler:
    """Draws from `alive`, a list that the engine maintains; without churn positions are node numbers."""

    def __init__(self, seed: int, alive: list[int], *, self_sampled: bool) -> None:
        self._seed = seed
        self._alive = alive
        self._self_sampled = self_sampled
        self._streams: dict[int, RandomStream] = {}

    def changed(self) -> None:
        """`alive` has changed."""

    def draw(self, node: int, count: int, _now: float, stop: Stop) -> list[int]:
        """Up to `count` distinct peers, in the order drawn; fewer if there are fewer, or if `stop` ended the draw."""
        stream = self._stream(node)
        barred = -1 if self._self_sampled else node
        return _distinct(stream, self._alive, count, barred, stop)

    def _stream(self, node: int) -> RandomStream:
        if node not in self._streams:
            self._streams[node] = RandomStream(self._seed, SAMPLES, node)
        return self._streams[node]


class BiasedSampler(UniformSampler):
    """Draws the owner of a random id: node j with probability proportional to its part of the id space, which is
    exponentially distributed. The largest of 1,000 is drawn about seven times too often."""

    def __init__(self, seed: int, alive: list[int], *, self_sampled: bool) -> None:
        super().__init__(seed, alive, self_sampled=self_sampled)
        self._sums: list[float] = []
        self.changed()

    def changed(self) -> None:
        parts = (RandomStream(self._seed, WEIGHTS, node).exponential() for node in self._alive)
        self._sums = list(accumulate(parts))

    def draw(self, node: int, count: int, _now: float, stop: Stop) -> list[int]:
        stream = self._stream(node)
        barred = -1 if self._self_sampled else node
        count = min(count, len(self._alive) - (barred >= 0))
        drawn: list[int] = []
        while len(drawn) < count:
            place = bisect_right(self._sums, stream.uniform() * self._sums[-1])
            peer = self._alive[min(place, len(self._alive) - 1)]
            if peer == barred or peer in drawn:
                continue
            drawn.append(peer)
            if stop(peer):
                break
        return drawn


class PoolSampler(UniformSampler):
    """Draws from a pool of `size` uniformly drawn peers per node, of which one is replaced every `renewal_s / size`.
    The daemon does so in a swarm larger than its pool (`overlay.discovery.sampling`). A peer may be in it twice."""

    def __init__(
        self,
        seed: int,
        alive: list[int],
        *,
        self_sampled: bool,
        size: int,
        renewal_s: float,
        founders: int,
        is_live: Callable[[int], bool],
    ) -> None:
        super().__init__(seed, alive, self_sampled=self_sampled)
        self._founders = founders
        self._size = size
        self._every_s = renewal_s / size
        self._is_live = is_live
        self._pools: dict[int, tuple[RandomStream, list[int]]] = {}
        self._oldest: dict[int, int] = {}
        self._renewed_s: dict[int, float] = {}

    def draw(self, node: int, count: int, now: float, stop: Stop) -> list[int]:
        if len(self._alive) - 1 <= self._size:
            return super().draw(node, count, now, stop)
        pool = [peer for peer in self._pool(node, now) if self._is_live(peer)]
        return _distinct(self._stream(node), pool, count, -1, stop)

    def _pool(self, node: int, now: float) -> list[int]:
        if node not in self._pools:
            stream = RandomStream(self._seed, POOLS, node)
            self._pools[node] = (stream, [self._find(stream, node) for _ in range(self._size)])
            self._oldest[node] = 0
            # An initial node has its pool from the start, a later one from its first draw.
            self._renewed_s[node] = 0.0 if node < self._founders else now
        stream, pool = self._pools[node]
        due = int((now - self._renewed_s[node]) / self._every_s)
        if due > 0:
            self._renewed_s[node] += due * self._every_s
            for _ in range(min(due, self._size)):
                pool[self._oldest[node]] = self._find(stream, node)
                self._oldest[node] = (self._oldest[node] + 1) % self._size
        return pool

    def _find(self, stream: RandomStream, node: int) -> int:
        while True:
            peer = self._alive[stream.below(len(self._alive))]
            if peer != node:
                return peer


def _distinct(stream: RandomStream, entries: Sequence[int], count: int, barred: int, stop: Stop) -> list[int]:
    """Up to `count` distinct entries other than `barred`, one after another."""
    total = len(entries)
    drawn: list[int] = []
    if count * REJECTION <= total:
        while len(drawn) < count:
            peer = entries[stream.below(total)]
            if peer == barred or peer in drawn:
                continue
            drawn.append(peer)
            if stop(peer):
                break
        return drawn
    order = list(range(total))
    for place in range(total):
        if len(drawn) >= count:
            break
        other = place + stream.below(total - place)
        order[place], order[other] = order[other], order[place]
        peer = entries[order[place]]
        if peer == barred or peer in drawn:
            continue
        drawn.append(peer)
        if stop(peer):
            break
    return drawn
