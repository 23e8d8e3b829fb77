"""What a node can hand down of the published values of others: their last changes, as it has received them. Pure.

A follower holds the same bits as the owner (`training.exchange.owner.published`), so the changes that it has received,
with the owner's digest, lead any other follower there too. They are kept encoded, for the shards that others may ask
this node for, and as an owner keeps them: while together they are smaller than the value, 64 at most. A whole value
comes from its owner only.

Each published value has a date: its owner had it then, or a later one. A date is in monotonic seconds of this node, and
travels as an age, to which every node adds the time that it has had the value. So no date depends on another clock, and
none is later than the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from training.encoding.codecs import CodecName, Encoded
from training.exchange.messages import PullResult, Wanted
from training.exchange.owner.published import Change, newest_within

#: No age in an answer is longer, in seconds: older ones are all the same.
MAX_AGE_S = 1e6
#: Of float32.
VALUE_BYTES = 4


@dataclass(slots=True)
class HeldChanges:
    """The last published value of a shard that this node has received: `result` says which, with the owner's digest."""

    result: PullResult
    date_s: float
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class Answered:
    """What one shard of a `Follow` is answered, and the changes that follow."""

    result: PullResult
    age_s: float
    changes: tuple[Change, ...] = ()


class HandedDown:
    """The changes that one node keeps for others, by shard."""

    def __init__(self) -> None:
        self._held: dict[int, HeldChanges] = {}

    def note(
        self,
        result: PullResult,
        date_s: float,
        values: int,
        arrays: Sequence[tuple[CodecName, Encoded]] = (),
    ) -> None:
        """This node holds the published value of a result, of a shard of so many values. `arrays`: the changes that
        led to it, if such did."""
        shard, held = result.shard, self._held.get(result.shard)
        changes: tuple[Change, ...] = ()
        if held is not None and held.result.chain == result.chain:
            if result.published < held.result.published:
                return  # another answer was faster
            date_s = max(date_s, held.date_s)
            if result.published == held.result.published:
                self._held[shard] = HeldChanges(result, date_s, held.changes)
                return
            if result.status == "changes" and held.result.published == result.published - result.changes:
                changes = held.changes
        if result.status == "changes":
            first = result.published - len(arrays) + 1
            fresh = (Change(first + place, codec, payload) for place, (codec, payload) in enumerate(arrays))
            changes = newest_within((*changes, *fresh), VALUE_BYTES * values)
        self._held[shard] = HeldChanges(result, date_s, changes)

    def forget(self, shard: int) -> None:
        """Keep nothing of a shard any more."""
        self._held.pop(shard, None)

    def answer(self, wanted: Wanted, now_s: float) -> Answered:
        """The answer about one shard: nothing new, the changes that the asker lacks, or that this node cannot help."""
        held = self._held.get(wanted.shard)
        if held is None:
            return Answered(PullResult(wanted.shard, "retry"), MAX_AGE_S)
        age_s = min(max(0.0, now_s - held.date_s), MAX_AGE_S)
        missing = held.result.published - wanted.published
        if wanted.chain != held.result.chain or not 0 <= missing <= len(held.changes):
            return Answered(_of(held.result, "retry", 0), age_s)
        if not missing:
            return Answered(_of(held.result, "same", 0), age_s)
        return Answered(_of(held.result, "changes", missing), age_s, held.changes[len(held.changes) - missing :])

    @property
    def size_bytes(self) -> int:
        """Memory of all changes that are kept."""
        return sum(len(change.payload) for held in self._held.values() for change in held.changes)


def _of(result: PullResult, status: Literal["same", "changes", "retry"], changes: int) -> PullResult:
    """The owner's words about a published value, in an answer of this status."""
    return msgspec.structs.replace(result, status=status, changes=changes, owner_info=None)
