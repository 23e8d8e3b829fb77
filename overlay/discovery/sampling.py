"""Uniform samples of peers by XOR-ball rejection, and the pool they are drawn from.

The closest node to a random id is not a uniform draw: some node is drawn eight times too often. Every node lies
within `radius` of a uniform target with probability exactly `radius`, so what lies inside such a ball is fair
(reference/population-and-sampling.md section 7, method C).

A ball of |S| nodes is kept with probability |S| / m and a draw takes one member of one kept ball: node v is then drawn
with probability sum over the balls around it of (|S| / m) (1 / |S|) = radius / m, the same for every v. That is method
C with the slot drawn later, so that one kept ball serves many draws; keeping every ball, as one would who takes all
of S, favours sparse regions by a few per cent. Members of one ball are neighbours, so a sample takes each of its peers
from another ball. A ball is dropped after two minutes, because a pool that is never renewed is a held sample.

Pure. `now` and the generator are arguments. Who is alive and training is the caller's `allowed`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from overlay.ids import relative_distance

#: Nodes expected in a ball. With k = 20 slots a ball overflows with probability 0.001 to 0.005.
BALL_NODES = 10.0
#: Slots of a ball (m in the reference): at least as many as a lookup returns.
SLOTS = 20
#: A pool entry is dropped after this long: what is drawn answered us at most so long ago.
POOL_AGE_S = 120.0
#: Fewest balls of a full pool. Kept balls hold `BALL_NODES` + 1 on average: together more than ten samples of ten.
POOL_BALLS = 12

T = TypeVar("T")


def ball_radius(population: float) -> float:
    """Radius that holds `BALL_NODES` of `population` nodes on average, as a share of the id space."""
    return min(1.0, BALL_NODES / max(population, 1.0))


def inside_ball(target: bytes, node_ids: Iterable[bytes], radius: float) -> list[bytes]:
    """The ids within `radius` of the target, in the order given."""
    return [node_id for node_id in node_ids if relative_distance(target, node_id) < radius]


def pick_slot(inside: Sequence[T], slots: int, rng: random.Random) -> T | None:
    """One exactly uniform draw, or None: retry with another target. `slots` must be at least the size of any ball."""
    slot = rng.randrange(slots)
    return inside[slot] if slot < len(inside) else None


def is_kept(ball_size: int, slots: int, rng: random.Random) -> bool:
    """Whether a ball enters the pool: with probability |S| / m, which makes a draw from it exactly uniform."""
    return rng.randrange(slots) < ball_size


class SamplePool:
    """Kept balls of the last two minutes. Draws go by balls, not by entries: that is what makes them uniform."""

    def __init__(self, age_s: float = POOL_AGE_S) -> None:
        self.age_s = age_s
        self._balls: deque[tuple[float, list[bytes]]] = deque()

    def add(self, inside: Iterable[bytes], now: float, most: int) -> None:
        """All nodes of one kept ball; the oldest ball goes where there are more than `most`."""
        self._balls.append((now, list(inside)))
        while len(self._balls) > most:
            self._balls.popleft()

    def expire(self, now: float) -> None:
        """Drop the balls that are too old."""
        while self._balls and now - self._balls[0][0] > self.age_s:
            self._balls.popleft()

    def discard(self, node_id: bytes) -> None:
        """It is dead or has left."""
        for _, inside in self._balls:
            if node_id in inside:
                inside.remove(node_id)

    def clear(self) -> None:
        self._balls.clear()

    @property
    def balls(self) -> int:
        return len(self._balls)

    def oldest_s(self, now: float) -> float | None:
        """Age of the oldest ball."""
        return now - self._balls[0][0] if self._balls else None

    def ids(self) -> list[bytes]:
        """The distinct ids, in the order they were found."""
        return list(dict.fromkeys(node_id for _, inside in self._balls for node_id in inside))

    def sample(self, count: int, allowed: Callable[[bytes], bool], rng: random.Random) -> list[bytes]:
        """Up to `count` distinct allowed ids, uniform without replacement: each from another ball while there are
        balls. A ball whose pick is not allowed has had its turn, or else the neighbours of such a node gained by it.
        """
        rest = [list(inside) for _, inside in self._balls if inside]
        rng.shuffle(rest)
        drawn: dict[bytes, None] = {}
        while rest and len(drawn) < count:
            for inside in rest:
                if len(drawn) >= count:
                    break
                index = rng.randrange(len(inside))
                inside[index], inside[-1] = inside[-1], inside[index]
                candidate = inside.pop()
                if candidate not in drawn and allowed(candidate):
                    drawn[candidate] = None
            rest = [inside for inside in rest if inside]
        return list(drawn)


def draw_distinct(
    entries: Sequence[bytes], count: int, allowed: Callable[[bytes], bool], rng: random.Random
) -> list[bytes]:
    """Up to `count` distinct allowed ids, drawn one after another; an id listed twice is twice as likely.

    A partial Fisher-Yates shuffle: `allowed` is asked only about what is drawn.
    """
    rest = list(entries)
    drawn: dict[bytes, None] = {}
    for end in range(len(rest), 0, -1):
        if len(drawn) >= count:
            break
        index = rng.randrange(end)
        rest[index], rest[end - 1] = rest[end - 1], rest[index]
        candidate = rest[end - 1]
        if candidate not in drawn and allowed(candidate):
            drawn[candidate] = None
    return list(drawn)
