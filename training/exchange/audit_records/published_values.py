"""A backup compares its own copy of a shard with what the owner publishes. Pure.

The owner forwards every delta, and the backup adds it: its copy is what the owner's value has to be. The two are never
the same bits: the backup has a delta before its owner adds it, a published value is rounded and some steps old, and the
order of additions differs. What an honest owner publishes is yet no further from the copy than the copy itself has come
in its last few steps; and it is never older than a few steps.

* *differs*: the distance at `POSITIONS` places, drawn by this node, is more than `FACTOR` times the way that the copy
  has gone there in its last `STEPS` comparisons and median steps (`SPARSE_STEPS` where changes are sparse, because a
  value may then wait for many changes), in `STREAK` comparisons in a row. So a wrong value may stay within that way,
  and a few places out of very many may be wrong.
  A copy with pending deltas is behind its owner's value, which is compared as soon as the copy has come as far.
* *ahead*: the published value has more deltas, by its version, than the owner has sent to the copy.
* *stale*: the published value lacks deltas that the copy has had for longer than an honest owner needs to publish them,
  and more of them than may have been forwarded and never added.

What the copy has is what its owner has sent: the owner's statements are compared with each other, and with nobody
else's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from training.encoding.codecs import Vector

#: Places of a shard that are compared.
POSITIONS = 1024
STEPS, SPARSE_STEPS = 4, 64
FACTOR = 1.25
#: And at least the way of so many seconds: what is under way to a learner has come to the backup already.
LEAST_S = 2.0
STREAK = 3
#: Rounding, as a share of the value: of a float32 that was added to many times, and of a bfloat16.
ROUNDED, ROUNDED_BFLOAT16 = 2.0**-16, 2.0**-7
#: An owner that is asked publishes what it has at the latest after so many median steps, and so many seconds.
STALE_STEPS, STALE_S = 10.0, 10.0
#: A copy may have so many deltas that its owner will never have: forwarded, not added because an answer was lost, and
#: not sent again because their origin crashed then.
UNADDED = 4
#: Comparisons of a shard whose way is remembered: of a node that is much faster than the median.
MAX_COMPARISONS = 256

Places = np.ndarray[tuple[int], np.dtype[np.int64]]


class BackedCopy(NamedTuple):
    """What a backup has of a shard: `float32[n]`, its version, and how many deltas are to be added to it still."""

    value: Vector
    version: int
    pending: int = 0


class CopyVerdict(StrEnum):
    """What a comparison says of the owner."""

    FITS = "fits"
    DIFFERS = "differs"
    AHEAD = "ahead"
    STALE = "stale"


class Doubt(NamedTuple):
    """A comparison with this copy does not fit."""

    copy: object
    verdict: CopyVerdict


@dataclass(slots=True)
class _Compared:
    """One shard, as long as this node has the same copy of it; times in monotonic seconds."""

    copy: object
    places: Places
    #: The copy at those places at the last comparison, and when each of the last ones was and how far it had gone.
    before: Vector
    way: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_COMPARISONS))
    #: The distance at the first comparison: a chain that came from another owner may begin further away.
    first: float | None = None
    is_sparse: bool = False
    streak: int = 0
    #: Of a published value that has deltas which the copy has pending: its version, and the value at those places.
    later: tuple[int, Vector] | None = None
    #: The versions that the copy had, and when; the oldest first. Then the one that was published last.
    versions: deque[tuple[float, int]] = field(default_factory=deque)
    published: int = 0

    def last_way(self, now_s: float, step_s: float) -> float | None:
        """How far the copy has gone of late; None while that is not known."""
        steps = SPARSE_STEPS if self.is_sparse else STEPS
        since_s, length = now_s - max(LEAST_S, steps * step_s), 0.0
        for number, (at_s, gone) in enumerate(reversed(self.way)):
            if number >= steps and at_s <= since_s:
                return length
            length += gone
        return length if len(self.way) == MAX_COMPARISONS else None


class PublishedValues:
    """The comparisons of one node."""

    def __init__(self) -> None:
        self._compared: dict[int, _Compared] = {}
        self._doubts: dict[int, Doubt] = {}

    def doubt(self, shard: int, copy: object, verdict: CopyVerdict) -> None:
        """A comparison does not fit. That says nothing where the owner has another backup by now, or none, and this
        node has not heard of it: it is asked first."""
        self._doubts[shard] = Doubt(copy, verdict)

    def take_doubts(self) -> dict[int, Doubt]:
        """By shard, since the last call."""
        doubts, self._doubts = self._doubts, {}
        return doubts

    def forget(self, shard: int) -> None:
        """This node has no copy of a shard any more."""
        self._compared.pop(shard, None)

    def is_begun(self, shard: int, copy: object) -> bool:
        """Whether this copy of a shard is the one that is compared."""
        known = self._compared.get(shard)
        return known is not None and known.copy is copy

    def begin(self, shard: int, copy: object, value: Vector, places: Places) -> None:
        """Compare a shard at these places, as long as this node has this copy of it."""
        self._compared[shard] = _Compared(copy, places, value[places])

    def compare(
        self,
        shard: int,
        copy: BackedCopy,
        published: Vector,
        version: int,
        now_s: float,
        step_s: float,
        *,
        is_rounded: bool = False,
        is_sparse: bool = False,
    ) -> CopyVerdict:
        """A published value of the owner, `float32[n]`, of this version, has just arrived. `is_rounded`: to bfloat16;
        `is_sparse`: the last changes were. `step_s`: the median step, in seconds."""
        known = self._compared[shard]
        known.is_sparse = known.is_sparse or is_sparse
        own, theirs = copy.value[known.places], published[known.places]
        known.way.append((now_s, _length(own - known.before)))
        known.before = own
        if version > copy.version + copy.pending:
            return CopyVerdict.AHEAD
        if version > copy.version:
            later, known.later = known.later, (version, theirs)
            if later is None or later[0] > copy.version:
                return CopyVerdict.FITS
            theirs = later[1]
        distance = _length(theirs - own)
        if known.first is None:
            known.first = distance
        if (way := known.last_way(now_s, step_s)) is None:
            return CopyVerdict.FITS
        rounding = (ROUNDED_BFLOAT16 if is_rounded else ROUNDED) * _length(own)
        known.streak = known.streak + 1 if distance > known.first + FACTOR * way + rounding else 0
        return CopyVerdict.DIFFERS if known.streak >= STREAK else CopyVerdict.FITS

    def date(self, shard: int, version: int, published: int | None, now_s: float, step_s: float) -> CopyVerdict:
        """The copy is of this version now, and the owner has answered with a value of that one; None: with nothing
        that leads to one. `step_s` as above."""
        known = self._compared[shard]
        published = known.published = known.published if published is None else published
        versions = known.versions
        if not versions or versions[-1][1] < version:
            versions.append((now_s, version))
        old_s = now_s - max(STALE_S, STALE_STEPS * step_s)
        while len(versions) > 1 and versions[1][0] <= old_s:
            versions.popleft()
        at_s, had = versions[0]
        return CopyVerdict.STALE if at_s <= old_s and had > published + UNADDED else CopyVerdict.FITS


def _length(vector: Vector) -> float:
    return float(np.sqrt(np.dot(vector, vector)))
