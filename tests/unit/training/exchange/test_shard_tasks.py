"""Tasks for shards: begun together once per turn, one at a time for each shard, and ended together."""

from __future__ import annotations

import asyncio
from functools import partial
from math import inf

import uvloop

from tests.harness.environment.simulated import ListLog
from tests.harness.environment.virtual_loop import run
from training.exchange.shard_tasks import FAULT_PAUSE_S, ShardTasks


class _Works(ShardTasks):
    """Works for all shards that wait and are not busy; each work ends when it is told to."""

    def __init__(self) -> None:
        self.log = ListLog([])
        super().__init__("test-work", self.log)
        self.waiting: list[int] = []
        self.begun: list[list[int]] = []
        self.ended: list[list[int]] = []
        self.go_on = asyncio.Event()
        self.faults: list[Exception] = []

    def begin(self) -> None:
        ready = [shard for shard in self.waiting if shard not in self.busy]
        self.begun.append(ready)
        self.waiting = [shard for shard in self.waiting if shard in self.busy]
        if ready:
            self.start(ready, partial(self._work, ready))

    async def _work(self, shards: list[int]) -> None:
        try:
            await self.go_on.wait()
            if self.faults:
                raise self.faults.pop()
        finally:
            self.ended.append(shards)
            self.free(shards)


async def _turns(count: int = 4) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_what_comes_in_one_turn_begins_together() -> None:
    """Three wakes of one turn are one `begin`, and nothing begins inside `wake` itself."""

    async def scenario() -> None:
        works = _Works()
        for shard in (3, 1, 2):
            works.waiting.append(shard)
            works.wake()
        assert works.begun == []
        await _turns()
        assert works.begun == [[3, 1, 2]]
        assert list(works.busy) == [3, 1, 2]
        await works.stop()

    run(scenario())


def test_a_busy_shard_begins_again_only_when_it_is_free() -> None:
    """`free` begins what is due by itself."""

    async def scenario() -> None:
        works = _Works()
        works.waiting = [1]
        works.wake()
        await _turns()
        works.waiting = [1, 2]
        works.wake()
        await _turns()
        assert works.begun == [[1], [2]]
        works.go_on.set()
        await _turns(8)
        assert works.begun[2:] == [[1], []]
        assert works.ended == [[1], [2], [1]]
        assert not works.busy
        await works.stop()

    run(scenario())


def test_nothing_begins_after_halt_and_stop_waits_for_all() -> None:
    """Tasks under way are cancelled and have ended when `stop` returns; a wake before or after begins nothing."""

    async def scenario() -> None:
        works = _Works()
        works.waiting = [1]
        works.wake()
        await _turns()
        works.waiting = [2]
        works.wake()
        assert not works.is_halted
        await works.stop()
        assert works.is_halted
        assert works.ended == [[1]]
        works.wake()
        await _turns()
        assert works.begun == [[1]]

    run(scenario())


def test_the_shards_of_work_that_had_a_fault_rest() -> None:
    """The fault is logged. Work for the same shards begins after a pause, and not again in every turn of the loop."""

    async def scenario() -> None:
        works = _Works()
        works.faults, works.waiting = [KeyError(1)], [1]
        works.go_on.set()
        works.wake()
        await _turns(8)
        works.waiting = [1]
        works.wake()
        await asyncio.sleep(FAULT_PAUSE_S - 0.1)
        begun = len(works.ended)
        await asyncio.sleep(0.2)

        assert (begun, works.ended) == (1, [[1], [1]])
        (record,) = works.log.records
        assert (record.event, record.fields["error"]) == ("exchange_service_failed", "KeyError(1)")
        await works.stop()

    run(scenario())


def test_what_is_due_later_begins_then() -> None:
    """Of several times the first counts, another may be set after it; nothing begins after the end."""

    async def scenario() -> None:
        works = _Works()
        works.waiting.append(1)
        works.wake_after(inf)
        works.wake_after(5.0)
        works.wake_after(2.0)
        works.wake_after(3.0)
        await asyncio.sleep(1.9)
        assert works.begun == []
        await asyncio.sleep(0.2)
        assert works.begun == [[1]]
        await asyncio.sleep(10.0)
        assert len(works.begun) == 1
        works.wake_after(1.0)
        await asyncio.sleep(1.1)
        assert len(works.begun) == 2
        works.wake_after(1.0)
        await works.stop()
        await asyncio.sleep(2.0)
        assert len(works.begun) == 2

    run(scenario())


def test_a_moment_that_has_come_is_no_fault_of_any_loop() -> None:
    """For one within a millisecond uvloop gives a handle that is no timer; the next is set all the same."""

    async def scenario() -> None:
        works = _Works()
        works.waiting.append(1)
        for seconds in (1e-6, 1e-7, 1e-6, 0.0):
            works.wake_after(seconds)
        async with asyncio.timeout(10.0):
            while not works.begun:  # noqa: ASYNC110 - a turn or two
                await asyncio.sleep(0)
        assert works.begun == [[1]]
        await works.stop()

    uvloop.run(scenario())
