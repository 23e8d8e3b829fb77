"""Updates of named values on their way into a shard, and the user's `pull` in the attached script, which takes them.

A request has many updates, and a repeated one shares its updates with the first. So an update tells its requests
itself: a future for each update would cost the loop a callback and a turn.

What raises is found: the updates that an error may come from are given to `pull` again, each by itself, and the one
that raises then is refused. So one bad update refuses no other. What no script has taken waits; after `SCRIPT_WAIT_S`
it is refused, unless the other side of a split has acknowledged it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from overlay.environment import Clock
from training.exchange.messages import PushResult
from training.shards.applied import DeltaId
from training.shards.value_batch import MAX_BATCH_BYTES, KeyUpdate
from training.shards.value_updates import cut, wrong_result
from training.values.store import EncodedPull, EncodedResult, EncodedUpdate, EncodedValue, PullFailed, ScriptGone


class Waiting:
    """`is_repair`: the other side of a split has acknowledged it. `is_alone`: it, or one that it was with, has raised
    in `pull`; it is given to it by itself. `result` is None until it is settled."""

    __slots__ = (
        "_listeners",
        "identity",
        "is_alone",
        "is_repair",
        "result",
        "sender",
        "since_s",
        "size_bytes",
        "update",
    )

    def __init__(
        self, update: KeyUpdate, identity: DeltaId, since_s: float, sender: bytes, *, is_repair: bool = False
    ) -> None:
        self.update = update
        self.size_bytes = update.size_bytes
        self.identity = identity
        self.since_s = since_s
        self.sender = sender
        self.is_repair = is_repair
        self.is_alone = False
        self.result: PushResult | None = None
        self._listeners: list[Callable[[], None]] = []

    def settle(self, result: PushResult) -> None:
        """Give it its result, once."""
        if self.result is None:
            self.result = result
            listeners, self._listeners = self._listeners, []
            for call in listeners:
                call()

    def listen(self, call: Callable[[], None]) -> None:
        """Call this when it is settled."""
        self._listeners.append(call)

    def forget(self, call: Callable[[], None]) -> None:
        """Do not call this any more."""
        if call in self._listeners:
            self._listeners.remove(call)


async def all_settled(waiting: Sequence[Waiting], timeout_s: float) -> None:
    """Return when each of these is settled, or after a time."""
    left = [one for one in dict.fromkeys(waiting) if one.result is None]
    if not left:
        return
    loop = asyncio.get_running_loop()
    is_over: asyncio.Future[None] = loop.create_future()
    count = len(left)

    def on_settled() -> None:
        nonlocal count
        count -= 1
        if not count:
            end()

    def end() -> None:
        if not is_over.done():
            is_over.set_result(None)

    for one in left:
        one.listen(on_settled)
    timer = loop.call_later(timeout_s, end)
    try:
        await is_over
    finally:
        timer.cancel()
        if count:
            for one in left:
                one.forget(on_settled)


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
        left = [(shard, one) for shard, waiting in taken.items() for one in waiting]
        reasons: dict[Waiting, str] = {}
        results: Sequence[EncodedResult] = []
        while left:
            try:
                results = await self._called([one.update for _, one in left], present)
                break
            except ScriptGone:
                return self._without_script(taken)
            except PullFailed as error:
                out = [entry for entry in left if entry[1].update.key == error.key] or left
                left = [entry for entry in left if entry not in out]
                for _, one in out:
                    if len(out) == 1:
                        reasons[one] = cut(error.reason)
                    one.is_alone = True
        values = _fitting({one.update.key: shard for shard, one in left}, results)
        settled = dict.fromkeys([*(one for shard, one in left if one.update.key in values[shard]), *reasons])
        found = {}
        for shard, waiting in taken.items():
            mine = [one for one in waiting if one in settled]
            failed = {place: reasons[one] for place, one in enumerate(mine) if one in reasons}
            found[shard] = PullOutcome(mine, [one for one in values.get(shard, {}).values() if one is not None], failed)
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


def _fitting(
    shard_of: Mapping[bytes, int], results: Sequence[EncodedResult]
) -> dict[int, dict[bytes, EncodedResult | None]]:
    """Per shard its keys with their last results, as many as a batch takes; None: `pull` has given none. The updates of
    the other keys wait on, and are given to `pull` again."""
    last: dict[bytes, EncodedResult] = {one[0]: one for one in results}
    found: dict[int, dict[bytes, EncodedResult | None]] = {}
    sizes: dict[int, int] = {}
    for key, shard in shard_of.items():
        result = last.get(key)
        size = 0 if result is None else len(result[1])
        if sizes.get(shard) and sizes[shard] + size > MAX_BATCH_BYTES:
            continue
        sizes[shard] = sizes.get(shard, 0) + size
        found.setdefault(shard, {})[key] = result
    return found
