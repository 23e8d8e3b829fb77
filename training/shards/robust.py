"""Robust aggregation: what one member that sends wrong or scaled deltas can do to a shard at most. Pure.

`clip`: a delta longer than the median length is shortened to that. The owner decides, by the weight it adds the
delta with, and its backup gets that weight: nothing is decided twice. The median is over members, the last accepted
length of each: who sends often has no more of a say. (Centered clipping around zero, Karimireddy et al. 2021, with the
median for a radius.)

`trimmed-mean`: deltas are collected in a window, one row per member however many it sent, and then per coordinate the
highest and the lowest rows are dropped (Yin et al. 2018). The rest stands for those dropped, so that a window weighs
what its deltas weigh. The owner decides when a window is complete and names the identities in it; its backup follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from training.encoding.codecs import Vector

Robust = Literal["", "clip", "trimmed-mean"]

#: A delta longer than this many medians is shortened to that. At 1 a liar weighs no more than an honest member, and
#: the longer half of the honest ones loses a little; at 2 these keep what they have, and a liar takes two with it.
CLIP_MULTIPLE = 1.0
#: And from here on it is worth a word, whatever the rule.
UNUSUAL_MULTIPLE = 5.0
#: Members that have to be known before the first delta of all has a median to be compared with.
FIRST_MEMBERS = 3
#: Share of the rows dropped at either end of a coordinate; from three rows on at least one.
TRIM_SHARE = 0.2
#: Members in a window at most, and deltas of one member: what a window may take of memory is the product.
MAX_MEMBERS = 16
MAX_DELTAS_PER_MEMBER = 4
#: Lengths kept, of so many members; those that are so many steps behind the median say nothing about now.
MAX_NORMS = 64
MAX_NORM_AGE_STEPS = 100
#: Values worked on at a time, over all rows: they fit a core's second cache.
BLOCK_VALUES = 1 << 16

#: node, incarnation, step, length: a row of `Norms` on the wire.
NormRow = tuple[bytes, int, int, float]


def norm_of(values: Vector) -> float:
    """Euclidean length; infinite or NaN where a value is."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = float(np.dot(values, values))
    if squares < 1e30:
        return math.sqrt(squares)
    # Overflow of float32, or something that is not finite: slow, and exact.
    return float(np.linalg.norm(values.astype(np.float64)))


class Norms:
    """The length of the last delta accepted from each member, before clipping; equal for owner and backup in whatever
    order they take the deltas, because the latest step counts."""

    __slots__ = ("_fresh", "_reference", "_rows")

    def __init__(self, rows: Iterable[NormRow] = ()) -> None:
        self._rows: dict[bytes, tuple[int, int, float]] = {node: (inc, step, norm) for node, inc, step, norm in rows}
        self._reference: float | None = None
        #: How many lengths may come before the median is looked at again.
        self._fresh = 0

    def __len__(self) -> int:
        return len(self._rows)

    def note(self, node: bytes, incarnation: int, step: int, norm: float) -> None:
        """A delta was added. One of length zero says nothing: a shard may rest."""
        if not norm > 0.0:
            return
        known = self._rows.get(node)
        if known is not None and (incarnation, step) < known[:2]:
            return
        if known is None and len(self._rows) >= MAX_NORMS:
            del self._rows[min((step, other) for other, (_, step, _) in self._rows.items())[1]]
        self._rows[node] = (incarnation, step, norm)
        self._fresh -= 1

    def reference(self) -> float | None:
        """The (lower) median length; None while none is known. A few deltas old at most."""
        if self._fresh <= 0 and self._rows:
            steps = sorted(step for _, step, _ in self._rows.values())
            since = steps[(len(steps) - 1) // 2] - MAX_NORM_AGE_STEPS
            norms = sorted(norm for _, step, norm in self._rows.values() if step >= since)
            self._reference = norms[(len(norms) - 1) // 2]
            self._fresh = len(self._rows) // 4
        return self._reference

    def rows(self) -> list[NormRow]:
        return [(node, *row) for node, row in self._rows.items()]

    def copy(self) -> Norms:
        return Norms(self.rows())


class FirstNorms:
    """Lengths seen before any delta of a shard was accepted: the first delta of all must not go unjudged, or a member
    that is quick could write what it likes. Nothing is accepted until three members (or all, where they are fewer)
    have shown theirs; they try again under the same identity."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[bytes, float]] = {}

    def reference(self, shard: int, node: bytes, norm: float, workers: float) -> float | None:
        """The median to go by; None: not yet."""
        seen = self._seen.setdefault(shard, {})
        if node in seen or len(seen) < MAX_NORMS:
            seen[node] = norm
        if len(seen) < min(FIRST_MEMBERS, max(1, round(workers))):
            return None
        norms = sorted(seen.values())
        return norms[(len(norms) - 1) // 2]

    def forget(self, shard: int) -> None:
        """A delta was accepted: from now on the shard's own norms tell."""
        self._seen.pop(shard, None)


def clip_factor(norm: float, reference: float) -> float:
    """What a delta of this length is multiplied with; above zero, at most 1. Without a reference nothing is long."""
    limit = CLIP_MULTIPLE * reference
    return 1.0 if norm <= limit or not reference > 0.0 else limit / norm


def is_unusual(norm: float, reference: float | None, members: int) -> bool:
    """Whether a length is worth a warning; two members are no majority to be unusual against."""
    return members >= FIRST_MEMBERS and reference is not None and norm > UNUSUAL_MULTIPLE * reference


def is_complete(members: int, deltas: int, workers: float) -> bool:
    """Whether a window is to be closed: when everybody has sent (Σw is 1 then), or when somebody has sent again and at
    least half have, at least three; or when it is full. Of fewer than three nothing can be trimmed, so that a window
    of theirs never waits.

    It counts members and never believes weights: one member alone cannot complete a window by sending much.
    """
    if not members:
        return False
    if workers < FIRST_MEMBERS - 0.5 or members >= min(MAX_MEMBERS, round(workers)):
        return True
    return deltas > members and members >= max(FIRST_MEMBERS, workers / 2)


def trimmed(count: int) -> int:
    """How many of so many rows are dropped at either end."""
    return 0 if count < 3 else max(1, int(count * TRIM_SHARE))


def trimmed_sum(rows: Sequence[Vector], out: Vector) -> None:
    """Per coordinate the sum of the rows without the highest and the lowest `trimmed(n)`, scaled up to all n rows.

    The extremes are bubbled to the ends by whole blocks of rows: for the few rows of a window this takes less than a
    tenth of what sorting each coordinate takes, and no large values have to cancel.
    """
    count = len(rows)
    drop = trimmed(count)
    size = max(1024, BLOCK_VALUES // max(1, count))
    spare = np.empty(min(size, out.size), dtype=np.float32)
    matrix = np.empty((count, spare.size), dtype=np.float32)
    for start in range(0, out.size, size):
        stop = min(start + size, out.size)
        block = matrix[:, : stop - start]
        for number, row in enumerate(rows):
            block[number] = row[start:stop]
        _extremes_outward(block, drop, spare[: stop - start])
        np.add.reduce(block[drop : count - drop], axis=0, out=out[start:stop])
    if drop:
        out *= np.float32(count / (count - 2 * drop))


def _extremes_outward(block: Vector, drop: int, spare: Vector) -> None:
    """Bring the `drop` highest of each column to the last rows and the lowest to the first ones, in place."""
    count = len(block)
    for turn in range(drop):
        for lower in range(turn, count - 1 - turn):
            _order(block[lower], block[lower + 1], spare)
        for lower in range(count - 3 - turn, turn - 1, -1):
            _order(block[lower], block[lower + 1], spare)


def _order(low: Vector, high: Vector, spare: Vector) -> None:
    np.minimum(low, high, out=spare)
    np.maximum(low, high, out=high)
    low[:] = spare
