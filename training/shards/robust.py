"""Robust aggregation: bounds what one member that sends wrong or scaled deltas can do to a shard. Pure.

`clip`: a delta longer than the median length is shortened to it (centered clipping around zero, Karimireddy et al.
2021, with the median as radius). The owner applies the factor to the weight, and its backup receives that weight, so
that nothing is decided twice. The median is over members, with the last accepted length of each: a member that sends
more often has no more influence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import numpy as np

from p2pnode.training.encoding.codecs import Vector

Robust = Literal["", "clip"]

#: A delta longer than this many medians is shortened to that. At 1 a malicious member has the influence of one honest
#: member, and the longer half of the honest deltas is clipped a little. At 2 few honest deltas are clipped, but a
#: malicious member has the influence of two.
CLIP_MULTIPLE = 1.0
#: A delta longer than this many medians is worth a warning, whatever the rule.
UNUSUAL_MULTIPLE = 5.0
#: Members whose lengths must be known before the first delta of a shard is accepted.
FIRST_MEMBERS = 3
#: Members whose lengths are kept; a length that is this many steps behind the median step no longer counts.
MAX_NORMS = 64
MAX_NORM_AGE_STEPS = 100

#: node, incarnation, step, length: a row of `Norms` on the wire.
NormRow = tuple[bytes, int, int, float]


def norm_of(values: Vector) -> float:
    """Euclidean length; infinite or NaN if a value is."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = float(np.dot(values, values))
        if not squares < 1e30:  # possible overflow of float32, or a value that is not finite: slow, but exact
            squares = float(np.dot(values.astype(np.float64), values.astype(np.float64)))
    return math.sqrt(squares)


class Norms:
    """The length of the last delta accepted from each member, before clipping: of the latest step."""

    __slots__ = ("_fresh", "_reference", "_rows")

    def __init__(self, rows: Iterable[NormRow] = ()) -> None:
        #: The member that was noted last comes last.
        self._rows: dict[bytes, tuple[int, int, float]] = {node: (inc, step, norm) for node, inc, step, norm in rows}
        self._reference: float | None = None
        #: How many lengths may be noted before the median is computed again.
        self._fresh = 0

    def __len__(self) -> int:
        return len(self._rows)

    def note(self, node: bytes, incarnation: int, step: int, norm: float) -> None:
        """A delta was added. A length of zero is ignored: a shard may have no gradient."""
        known = self._rows.get(node, (0, 0, 0.0))
        if not norm > 0.0 or (incarnation, step) < known[:2]:
            return
        self._rows.pop(node, None)
        self._rows[node] = (incarnation, step, norm)
        if len(self._rows) > MAX_NORMS:
            del self._rows[next(iter(self._rows))]
        self._fresh -= 1

    def reference(self) -> float | None:
        """The (lower) median length, at most a few deltas old; None if no length is known."""
        if self._fresh <= 0 and self._rows:
            steps = sorted(step for _, step, _ in self._rows.values())
            since = steps[(len(steps) - 1) // 2] - MAX_NORM_AGE_STEPS
            norms = sorted(norm for _, step, norm in self._rows.values() if step >= since)
            self._reference = norms[(len(norms) - 1) // 2]
            self._fresh = max(1, len(self._rows) // 4)
        return self._reference

    def rows(self) -> list[NormRow]:
        return [(node, *row) for node, row in self._rows.items()]

    def copy(self) -> Norms:
        return Norms(self.rows())


class FirstNorms:
    """Lengths seen before the first delta of a shard is accepted, by shard and member.

    Without a reference, a quick member could write any value. So no delta is accepted until three members (or all, if
    they are fewer) have sent one; they send it again under the same identity.
    """

    def __init__(self) -> None:
        self._seen: dict[int, dict[bytes, float]] = {}

    def reference(self, shard: int, node: bytes, norm: float, workers: float) -> float | None:
        """The median of the lengths seen; None if they are too few."""
        seen = self._seen.setdefault(shard, {})
        if node in seen or len(seen) < MAX_NORMS:
            seen[node] = norm
        if len(seen) < min(FIRST_MEMBERS, max(1, round(workers))):
            return None
        norms = sorted(seen.values())
        return norms[(len(norms) - 1) // 2]

    def forget(self, shard: int) -> None:
        """A delta was accepted: from now on the shard has its own norms."""
        self._seen.pop(shard, None)


def clip_factor(norm: float, reference: float) -> float:
    """The factor for a delta of this length, above 0 and at most 1; it is 1 without a positive reference."""
    limit = CLIP_MULTIPLE * reference
    return 1.0 if norm <= limit or not reference > 0.0 else limit / norm


def is_unusual(norm: float, reference: float | None, members: int) -> bool:
    """Whether a length is worth a warning. With only two members, neither is unusual."""
    return members >= FIRST_MEMBERS and reference is not None and norm > UNUSUAL_MULTIPLE * reference
