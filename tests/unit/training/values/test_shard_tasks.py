"""Tasks for shards: begun together once per turn, one at a time for each shard, and ended together.

When the next request to a receiver begins: with the answer of the last, or after a moment; never too many.

What waits for shards is sent to their owners: one request per shard, and a rest after a failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any

import pytest
import uvloop

from overlay.peers import Contact
from overlay.transport import TransportError
from tests.harness.builders.stores import contact, store_of
from tests.harness.environment.simulated import ListLog
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of
from training.values.shard_tasks import (
    FAULT_PAUSE_S,
    FIRST_RETRY_S,
    MAX_RETRY_S,
    REQUESTS_AT_ONCE,
    STAGGER_S,
    OwnerPump,
    ShardTasks,
    Staggered,
)


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


def test_the_next_begins_with_the_answer_or_after_a_moment() -> None:
    """The moment counts from the last that has begun; of another receiver nothing is waited for."""
    requests = Staggered(3)
    assert requests.wait_s("a", 5.0) == 0.0
    first_s = requests.begin("a", 5.0)
    assert requests.wait_s("a", 5.0) == pytest.approx(STAGGER_S)
    assert requests.wait_s("a", 5.0 + STAGGER_S / 4) == pytest.approx(0.75 * STAGGER_S)
    assert requests.wait_s("a", 5.0 + 2 * STAGGER_S) == 0.0
    assert requests.wait_s("b", 5.0) == 0.0
    requests.begin("a", 6.0)
    assert requests.wait_s("a", 6.0) == pytest.approx(STAGGER_S)
    requests.end("a", first_s)
    assert requests.wait_s("a", 6.0) == pytest.approx(STAGGER_S)
    requests.end("a", 6.0)
    assert requests.wait_s("a", 6.0) == 0.0


def test_there_are_never_too_many() -> None:
    """However long they take; two that began in one moment are two."""
    requests = Staggered(2)
    for _ in range(2):
        requests.begin("a", 1.0)
    assert requests.wait_s("a", 100.0) == inf
    requests.end("a", 1.0)
    assert requests.wait_s("a", 100.0) == 0.0


OWNER, OTHER = contact("b"), contact("c")


class Directory:
    """Owners by shard; keeps what it was told."""

    def __init__(self, owners: dict[int, Contact]) -> None:
        self.owners = owners
        self.failures: list[bytes] = []
        self.refreshed: list[list[int]] = []

    def by_owner(self, shards: list[int]) -> tuple[list[tuple[Contact, list[int]]], list[int]]:
        groups: dict[bytes, tuple[Contact, list[int]]] = {}
        for shard in shards:
            if (owner := self.owners.get(shard)) is not None:
                groups.setdefault(owner.node_id, (owner, []))[1].append(shard)
        return list(groups.values()), [shard for shard in shards if shard not in self.owners]

    def failed(self, owner: Contact, error: TransportError) -> None:
        self.failures.append(owner.node_id)

    async def refresh(self, shards: list[int]) -> None:
        self.refreshed.append(shards)


class Bench:
    """A pump whose requests take `request_s`, and of whose shards `unanswered` are asked for again."""

    def __init__(self, owners: dict[int, Contact], *, request_s: float = 0.05) -> None:
        self.directory = Directory(owners)
        self.waiting: dict[int, None] = {}
        self.sent: list[tuple[float, str, list[int]]] = []
        self.unanswered: Callable[[], bool] = lambda: False
        self.error: TransportError | None = None
        self.under_way = self.most = 0
        self._request_s = request_s
        context: Any = context_of(ScriptedSwarm(contact("a"), [OWNER, OTHER]), store_of("a"))
        self.pump = OwnerPump(context, self.directory, lambda: list(self.waiting), self._send)  # type: ignore[arg-type]

    def want(self, *shards: int) -> None:
        self.waiting |= dict.fromkeys(shards)
        self.pump.wake()

    async def _send(self, owner: Contact, shards: list[int]) -> list[int]:
        self.sent.append((asyncio.get_running_loop().time(), chr(owner.address.port), list(shards)))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await asyncio.sleep(self._request_s)
        finally:
            self.under_way -= 1
        if self.error is not None:
            raise self.error
        if self.unanswered():
            return shards
        for shard in shards:
            self.waiting.pop(shard, None)
        return []

    def starts_s(self) -> list[float]:
        return [at_s for at_s, _, _ in self.sent]


def test_shards_of_one_owner_go_in_one_request() -> None:
    """One request to each owner; where nothing waits nothing is sent."""

    async def scenario() -> None:
        bench = Bench({0: OWNER, 1: OTHER, 2: OWNER})
        bench.pump.wake()
        await asyncio.sleep(0.1)
        assert bench.sent == []
        bench.want(0, 1, 2)
        await asyncio.sleep(1.0)
        assert sorted((name, shards) for _, name, shards in bench.sent) == [("b", [0, 2]), ("c", [1])]
        assert bench.waiting == {}
        assert list(bench.pump.busy) == []
        await bench.pump.stop()

    run(scenario())


def test_a_shard_has_one_request_at_a_time() -> None:
    """What comes for it meanwhile goes with the next one."""

    async def scenario() -> None:
        bench = Bench({0: OWNER}, request_s=1.0)
        bench.want(0)
        await asyncio.sleep(0.5)
        for _ in range(5):
            bench.want(0)
            await asyncio.sleep(0.05)
        assert len(bench.sent) == 1
        await asyncio.sleep(1.0)
        assert bench.most == 1
        await bench.pump.stop()

    run(scenario())


def test_an_owner_has_few_requests_at_once() -> None:
    """The others begin as those before have ended, and every shard is sent once."""

    async def scenario() -> None:
        bench = Bench(dict.fromkeys(range(8), OWNER), request_s=1.0)
        for shard in range(8):
            bench.want(shard)
            await asyncio.sleep(0.05)
        assert bench.most == REQUESTS_AT_ONCE
        await asyncio.sleep(5.0)
        assert bench.most == REQUESTS_AT_ONCE
        assert sorted(shard for _, _, shards in bench.sent for shard in shards) == list(range(8))
        await bench.pump.stop()

    run(scenario())


def test_a_failed_request_is_sent_again_after_rests_that_grow() -> None:
    """The owner is reported, and asked about, each time; rests double up to their limit, and begin anew after an
    answer."""

    async def scenario() -> None:
        bench = Bench({0: OWNER}, request_s=0.0)
        bench.error = TransportError("timeout", OWNER.address, "no answer")
        bench.want(0)
        await asyncio.sleep(5.0)
        starts = bench.starts_s()
        rests = [later - earlier for earlier, later in pairwise(starts)]
        assert all(
            0.5 * wanted - 1e-9 <= rest <= 1.5 * wanted + 1e-9 for rest, wanted in zip(rests, grown(), strict=False)
        )
        assert len(bench.directory.failures) >= len(bench.directory.refreshed) > 8
        assert set(bench.directory.failures) == {OWNER.node_id}
        assert bench.directory.refreshed[0] == [0]

        bench.error = None
        await asyncio.sleep(1.0)
        assert bench.waiting == {}
        bench.error = TransportError("timeout", OWNER.address, "no answer")
        before = len(bench.sent)
        bench.want(0)
        await asyncio.sleep(1.5 * FIRST_RETRY_S + 0.001)
        assert len(bench.sent) >= before + 2
        await bench.pump.stop()

    run(scenario())


def grown() -> list[float]:
    """The rests without their jitter."""
    rests, rest_s = [], FIRST_RETRY_S
    for _ in range(40):
        rests.append(rest_s)
        rest_s = min(2 * rest_s, MAX_RETRY_S)
    return rests


def test_a_shard_that_was_not_answered_rests_alone() -> None:
    """The others of its request are free at once."""

    async def scenario() -> None:
        bench = Bench({0: OWNER, 1: OWNER}, request_s=0.01)
        bench.unanswered = lambda: True
        bench.want(0)
        await asyncio.sleep(0.0105)
        assert list(bench.pump.busy) == [0]
        bench.unanswered = lambda: False
        bench.want(1)
        await asyncio.sleep(0.002)
        assert [shards for _, _, shards in bench.sent][-1] == [1]
        await asyncio.sleep(1.0)
        assert bench.waiting == {}
        assert bench.directory.failures == []
        await bench.pump.stop()

    run(scenario())


def test_a_shard_without_a_known_owner_is_looked_for_and_then_sent() -> None:
    """It takes no request meanwhile."""

    async def scenario() -> None:
        bench = Bench({})
        bench.want(3)
        await asyncio.sleep(0.1)
        assert bench.sent == []
        assert bench.directory.refreshed[0] == [3]
        bench.directory.owners[3] = OWNER
        await asyncio.sleep(MAX_RETRY_S * 1.5)
        assert [(name, shards) for _, name, shards in bench.sent] == [("b", [3])]
        await bench.pump.stop()

    run(scenario())
