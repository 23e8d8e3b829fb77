"""Tasks for shards: begun together once per turn, one at a time for each shard, and ended together.

When the next request to a receiver begins: with the answer of the last, or after a moment; never too many.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from functools import partial
from typing import cast

import pytest

from p2pnode.training.values.shard_tasks import AT_ONCE, FAULT_PAUSE_S, STAGGER_S, ShardTasks
from tests.harness.builders.stores import contact, store_of
from tests.harness.environment.simulated import ListLog
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of


class _Works(ShardTasks):
    """Works for all shards that wait and are not busy; each work ends when it is told to."""

    def __init__(self, receiver: Hashable = None) -> None:
        environment = context_of(ScriptedSwarm(contact("a")), store_of("a")).environment
        super().__init__("test-work", environment)
        self.records = cast(ListLog, environment.log).records
        self.receiver = receiver
        self.waiting: list[int] = []
        self.begun: list[list[int]] = []
        self.started_s: list[float] = []
        self.ended: list[list[int]] = []
        self.go_on = asyncio.Event()
        self.faults: list[Exception] = []

    def begin(self) -> None:
        ready = [shard for shard in self.waiting if shard not in self.busy]
        self.begun.append(ready)
        if ready:
            self.start(ready, partial(self._wait, ready), self.receiver)

    async def _wait(self, shards: list[int]) -> None:
        self.started_s.append(asyncio.get_running_loop().time())
        self.waiting = [shard for shard in self.waiting if shard not in shards]
        try:
            await self.go_on.wait()
            if self.faults:
                raise self.faults.pop()
        finally:
            self.ended.append(shards)

    def want(self, *shards: int) -> None:
        self.waiting += shards
        self.wake()


async def _turns(count: int = 4) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@run_by(run)
async def test_a_shard_that_was_handed_to_other_work_stays_busy_with_that() -> None:
    """The end of the first work frees the rest alone."""
    works = _Works()

    async def first() -> None:
        works.start([1], works.go_on.wait)  # type: ignore[arg-type]

    works.start([1, 2], first)
    await _turns()
    assert list(works.busy) == [1]
    works.go_on.set()
    await _turns()
    assert not works.busy
    await works.stop()


@run_by(run)
async def test_the_shards_of_work_that_had_a_fault_rest() -> None:
    """The fault is logged. Work for the same shards begins after a pause, and not again in every turn of the loop."""
    works = _Works()
    works.faults = [KeyError(1)]
    works.go_on.set()
    works.want(1)
    await _turns(8)
    works.want(1)
    await asyncio.sleep(FAULT_PAUSE_S - 0.1)
    begun = len(works.ended)
    await asyncio.sleep(0.2)

    assert (begun, works.ended) == (1, [[1], [1]])
    (record,) = works.records
    assert (record.event, record.fields["error"]) == ("exchange_service_failed", "KeyError(1)")
    await works.stop()


@run_by(run)
async def test_the_next_begins_with_the_answer_or_after_a_moment() -> None:
    """The moment counts from the last that has begun; of another receiver nothing is waited for."""
    works, loop = _Works("receiver"), asyncio.get_running_loop()
    began_s = loop.time()
    works.want(1)
    await asyncio.sleep(STAGGER_S / 4)
    works.want(2)
    await _turns()
    assert list(works.busy) == [1]
    works.receiver = "other"
    works.want(3)
    works.waiting.remove(2)
    await _turns()
    assert list(works.busy) == [1, 3]
    works.receiver = "receiver"
    works.want(2)
    await asyncio.sleep(STAGGER_S)
    assert works.started_s[2] - began_s == pytest.approx(STAGGER_S, abs=1e-6)
    works.go_on.set()
    await _turns()
    works.want(4)
    await _turns()
    assert works.started_s[3] == loop.time(), "all had their answers"
    await works.stop()


@run_by(run)
async def test_there_are_never_too_many() -> None:
    """However long they take, the next begins with the end of one of them."""
    works = _Works("receiver")
    for shard in range(AT_ONCE + 2):
        works.want(shard)
        await asyncio.sleep(2 * STAGGER_S)
    await asyncio.sleep(10.0)
    assert list(works.busy) == list(range(AT_ONCE))
    works.go_on.set()
    await _turns(8)
    assert works.ended[-1] == [AT_ONCE, AT_ONCE + 1]
    await works.stop()
