"""Uniform samples of peers by XOR-ball rejection, and the pool they are drawn from.

The closest node to a random id is not a uniform draw: some node is drawn eight times too often. Every node lies
within `radius` of a uniform target with probability exactly `radius`, so what lies inside such a ball is fair
(reference/population-and-sampling.md section 7, method C). The pool holds several balls at once, because the members
of one ball are neighbours, and drops each after a minute, because a pool that is never renewed is a held sample.

Pure: `now` and the generator are arguments. Who is alive and training is the caller's `allowed`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from overlay.ids import relative_distance

#: Nodes expected in a ball. With k = 20 slots a ball overflows with probability 0.001 to 0.005.
BALL_NODES = 10.0
#: A pool entry is dropped after this long.
POOL_AGE_S = 60.0
#: The pool is at least ten times the largest sample (10), or everybody.
POOL_SIZE = 100

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


def sample_size_for_everybody(population: float) -> int:
    """How many peers the pool should hold: `POOL_SIZE`, or all there are."""
    return min(POOL_SIZE, max(0, round(population) - 1))


class Pool:
    """Peers found in balls of the last minute. A peer found twice counts twice, which keeps draws uniform."""

    def __init__(self, age_s: float = POOL_AGE_S) -> None:
        self.age_s = age_s
        self._balls: list[tuple[float, tuple[bytes, ...]]] = []

    def add(self, inside: Iterable[bytes], now: float) -> None:
        """All nodes of one ball (an empty ball is evidence too, but nothing to draw)."""
        self._balls.append((now, tuple(inside)))

    def expire(self, now: float) -> None:
        """Drop the balls that are too old."""
        self._balls = [ball for ball in self._balls if now - ball[0] <= self.age_s]

    def clear(self) -> None:
        self._balls.clear()

    @property
    def balls(self) -> int:
        return len(self._balls)

    def ids(self) -> list[bytes]:
        """The distinct ids, in the order they were found."""
        return list(dict.fromkeys(node_id for _, inside in self._balls for node_id in inside))

    def draw(self, count: int, allowed: Callable[[bytes], bool], rng: random.Random) -> list[bytes]:
        """Up to `count` distinct allowed ids, uniform without replacement."""
        entries = [node_id for _, inside in self._balls for node_id in inside]
        return draw_distinct(entries, count, allowed, rng)


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
