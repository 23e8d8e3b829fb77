"""Updates of named values that wait at their owner, and the user's `pull` in the attached script, which takes them.

What raises is found: the updates that an error may come from are given to `pull` again, each by itself, and the one
that raises then is refused. So one bad update refuses no other. What no script has taken waits; after `SCRIPT_WAIT_S`
it is refused, unless the other side of a split has acknowledged it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from p2pnode.overlay.environment import Clock
from p2pnode.training.exchange.messages import PushResult
from p2pnode.training.shards.applied import DeltaId
from p2pnode.training.shards.value_batch import MAX_BATCH_BYTES, KeyUpdate
from p2pnode.training.shards.value_updates import cut, wrong_result
from p2pnode.training.values.store import (
    EncodedPull,
    EncodedResult,
    EncodedUpdate,
    EncodedValue,
    PullFailed,
    ScriptGone,
)


@dataclass(slots=True, eq=False)
class Waiting:
    """An update that waits for its batch since `since_s`. `is_repair`: the other side of a split has
    acknowledged it. `is_alone`: it, or one that it was with, has raised in `pull`; it is given to it by itself."""

    update: KeyUpdate
    identity: DeltaId
    since_s: float
    is_repair: bool = False
    is_alone: bool = False
    #: None until it is settled.
    result: PushResult | None = None


#: An update for the user's `pull` waits this long for a script.
SCRIPT_WAIT_S = 10.0
SCRIPT_RETRY_S = 0.25
NO_SCRIPT = "no script with a pull function is attached to the node that owns the key"


class PullOutcome(NamedTuple):
    """What `pull` made of updates of one shard: its results, and why some failed, by their places."""

    waiting: list[Waiting]
    results: list[EncodedResult]
    failed: dict[int, str]


class ScriptPulls:
    """The `pull` of the attached script, if there is one."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pull: EncodedPull | None = None
        self._until_s = 0.0

    def attach(self, pull: EncodedPull | None) -> None:
        """Use this function from now on; None: there is no script."""
        self._pull, self._until_s = pull, 0.0

    @property
    def rests(self) -> bool:
        """Whether no script was there a moment ago."""
        return self._clock.monotonic() < self._until_s

    async def outcome(
        self, taken: Mapping[int, list[Waiting]], present: Mapping[bytes, EncodedValue]
    ) -> dict[int, PullOutcome]:
        """Give the updates of shards to `pull`, in one call. Those that are in no outcome wait on."""
        left = {one: shard for shard, waiting in taken.items() for one in waiting}
        reasons: dict[Waiting, str] = {}
        results: Sequence[EncodedResult] = []
        while left:
            try:
                results = await self._called([one.update for one in left], present)
                break
            except ScriptGone:
                return self._without_script(taken)
            except PullFailed as error:
                out = [one for one in left if one.update.key == error.key] or list(left)
                if len(out) == 1:
                    reasons[out[0]] = cut(error.reason)
                for one in out:
                    one.is_alone = True
                    del left[one]
        last = {result[0]: result for result in results}
        found = {}
        for shard, waiting in taken.items():
            fits = _fitting((one.update.key for one in waiting if one in left), last)
            mine = [one for one in waiting if one in reasons or (one in left and one.update.key in fits)]
            failed = {place: reasons[one] for place, one in enumerate(mine) if one in reasons}
            found[shard] = PullOutcome(mine, [last[key] for key in fits if key in last], failed)
        return found

    async def _called(self, updates: list[KeyUpdate], present: Mapping[bytes, EncodedValue]) -> Sequence[EncodedResult]:
        if self._pull is None:
            raise ScriptGone(NO_SCRIPT)
        given = [EncodedUpdate(one.key, one.update, one.timestamp, one.reducer) for one in updates]
        results = await self._pull(given, {one.key: present[one.key] for one in updates if one.key in present})
        if wrong := wrong_result(updates, results):
            raise PullFailed(None, wrong)
        return results

    def _without_script(self, taken: Mapping[int, list[Waiting]]) -> dict[int, PullOutcome]:
        """Refuse what has waited too long for a script."""
        now = self._clock.monotonic()
        self._until_s = now + SCRIPT_RETRY_S
        found = {}
        for shard, waiting in taken.items():
            # One that is acknowledged already waits as long as it takes, and so do those behind it.
            first = list(takewhile(lambda one: not one.is_repair and now - one.since_s >= SCRIPT_WAIT_S, waiting))
            if first:
                found[shard] = PullOutcome(first, [], dict.fromkeys(range(len(first)), NO_SCRIPT))
        return found


def _fitting(keys: Iterable[bytes], results: Mapping[bytes, EncodedResult]) -> dict[bytes, None]:
    """The keys whose results a batch takes. The updates of the others wait on, and are given to `pull` again."""
    found: dict[bytes, None] = {}
    size_bytes = 0
    for key in dict.fromkeys(keys):
        added = len(results[key][1]) if key in results else 0
        if not size_bytes or size_bytes + added <= MAX_BATCH_BYTES:
            found[key] = None
            size_bytes += added
    return found
