"""Draws uniform samples of peers from Kademlia lookups, by rejection, and keeps the pool they are drawn from.

A lookup finds a *ball*: all nodes within `radius` of a random target. Every node is in it with the same probability,
`radius`. The closest node to a random id would not be a uniform draw: some nodes are drawn eight times too often.

A ball of |S| nodes is kept with probability |S| / m (m = `SLOTS`), and a draw takes one member of one kept ball. Node v
is then drawn with probability sum over the balls around it of (|S| / m) (1 / |S|) = radius / m, the same for every v.
Keeping every ball would favour nodes of sparse regions by a few per cent, because their balls have fewer members. One
kept ball is used for many samples, but a sample takes each of its peers from another ball, because members of one ball
are neighbours. A ball is dropped after `POOL_AGE_S`: without renewal all samples would come from the same few nodes.

Pure. `now` and the generator are arguments; the caller's `allowed` decides which peers may be drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from p2pnode.overlay.ids import relative_distance

#: Nodes expected in a ball. With k = 20 slots a ball overflows with probability 0.001 to 0.005.
BALL_NODES = 10.0
#: The m above: at least as many as a lookup returns.
SLOTS = 20
#: Lifetime of a ball.
POOL_AGE_S = 120.0
#: Fewest balls of a full pool. A kept ball has `BALL_NODES` + 1 nodes on average, so 12 hold about 130 peers.
POOL_BALLS = 12


def ball_radius(population: float) -> float:
    """Radius that holds `BALL_NODES` of `population` nodes on average, as a share of the id space."""
    return min(1.0, BALL_NODES / max(population, 1.0))


def inside_ball(target: bytes, node_ids: Iterable[bytes], radius: float) -> list[bytes]:
    """The ids within `radius` of the target, in the order given."""
    return [node_id for node_id in node_ids if relative_distance(target, node_id) < radius]


def is_kept(ball_size: int, rng: random.Random) -> bool:
    """Whether a ball enters the pool: with probability |S| / m, which makes a draw from it exactly uniform."""
    return rng.randrange(SLOTS) < ball_size


class SamplePool:
    """The kept balls of the last `POOL_AGE_S`. A draw takes a ball first and then a member, which makes it uniform."""

    def __init__(self) -> None:
        #: When each was kept, in monotonic seconds, and its ids; the oldest first.
        self._balls: list[tuple[float, list[bytes]]] = []

    def add(self, ball: Iterable[bytes], now: float, max_balls: int) -> None:
        """Add the nodes of one kept ball, and drop the oldest ball when there are more than `max_balls`."""
        self._balls.append((now, list(ball)))
        del self._balls[: max(0, len(self._balls) - max_balls)]

    def expire(self, now: float) -> None:
        """Drop the balls that are too old."""
        while self._balls and now - self._balls[0][0] > POOL_AGE_S:
            del self._balls[0]

    def discard(self, node_id: bytes) -> None:
        """Remove a node that is dead or has left."""
        for _, ball in self._balls:
            if node_id in ball:
                ball.remove(node_id)

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
        return list(dict.fromkeys(node_id for _, ball in self._balls for node_id in ball))

    def sample(self, count: int, allowed: Callable[[bytes], bool], rng: random.Random) -> list[bytes]:
        """At most `count` distinct allowed ids, uniform without replacement.

        In each round every ball gives one draw. A draw that is not allowed is not replaced by another from its ball:
        the neighbours of that node would be drawn more often.
        """
        rest = [list(ball) for _, ball in self._balls if ball]
        rng.shuffle(rest)
        drawn: dict[bytes, None] = {}
        while rest and len(drawn) < count:
            for ball in rest:
                if len(drawn) >= count:
                    break
                index = rng.randrange(len(ball))
                ball[index], ball[-1] = ball[-1], ball[index]
                candidate = ball.pop()
                if candidate not in drawn and allowed(candidate):
                    drawn[candidate] = None
            rest = [ball for ball in rest if ball]
        return list(drawn)


def draw_distinct(
    node_ids: Sequence[bytes], count: int, allowed: Callable[[bytes], bool], rng: random.Random
) -> list[bytes]:
    """At most `count` allowed ids of distinct ones, uniform: for a list of all nodes, and while the pool is too small.

    A partial Fisher-Yates shuffle: `allowed` is called only for the ids drawn.
    """
    rest = list(node_ids)
    drawn: list[bytes] = []
    while rest and len(drawn) < count:
        index = rng.randrange(len(rest))
        rest[index], rest[-1] = rest[-1], rest[index]
        candidate = rest.pop()
        if allowed(candidate):
            drawn.append(candidate)
    return drawn
