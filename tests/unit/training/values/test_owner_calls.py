"""Calls for the owners of shards: many in one request, each until its final answer, and a rest after a failure."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any, cast

import pytest

from p2pnode.overlay.peers import Contact
from p2pnode.overlay.transport import TransportError
from p2pnode.training.exchange.messages import PushResult
from p2pnode.training.values.client import FIRST_RETRY_S, MAX_RETRY_S, OwnerCalls
from p2pnode.training.values.rounds import LATER
from p2pnode.training.values.shard_tasks import AT_ONCE, FAULT_PAUSE_S, STAGGER_S
from p2pnode.training.values.store import StoreUnavailable
from tests.harness.builders.stores import contact, store_of
from tests.harness.environment.simulated import ListLog
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of

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

    def answered(self, _owner: Contact, _results: Any) -> None: ...

    def failed(self, owner: Contact, _error: TransportError) -> None:
        self.failures.append(owner.node_id)

    async def refresh(self, shards: list[int], *, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self.refreshed.append(shards)


class Bench:
    """Calls whose requests take `request_s`; shards in `later` and `moving` are answered so."""

    def __init__(self, owners: dict[int, Contact], *, request_s: float = 0.05) -> None:
        self.directory = Directory(owners)
        self.sent: list[tuple[float, str, list[int]]] = []
        self.moving: list[int] = []
        self.later: list[int] = []
        self.error: Exception | None = None
        self.answers_lost = 0
        self._request_s = request_s
        environment = context_of(ScriptedSwarm(contact("a"), [OWNER, OTHER]), store_of("a")).environment
        self.log = cast(ListLog, environment.log)
        self.calls: OwnerCalls[str, PushResult] = OwnerCalls(self.directory, environment, self._ask)  # type: ignore[arg-type]

    async def _ask(self, owner: Contact, asked: list[tuple[int, str]]) -> list[PushResult]:
        shards = [shard for shard, _ in asked]
        self.sent.append((asyncio.get_running_loop().time(), chr(owner.address.port), shards))
        await asyncio.sleep(self._request_s)
        if self.error is not None:
            raise self.error
        results = []
        for shard in shards:
            if shard in self.moving:
                results.append(PushResult.retry(shard, "moving"))
            elif shard in self.later:
                results.append(PushResult(shard, "retry", reason=LATER))
            else:
                results.append(PushResult(shard, "ok"))
        return results[self.answers_lost :]

    def call(self, *shards: int) -> list[asyncio.Future[Any]]:
        return [self.calls.call(shard, "") for shard in shards]

    @property
    def requests(self) -> list[tuple[str, list[int]]]:
        return [(name, shards) for _, name, shards in self.sent]


@run_by(run)
async def test_a_shard_has_one_request_at_a_time_and_an_owner_few() -> None:
    """What comes for a shard meanwhile goes with its next request; every call is sent once."""
    bench = Bench(dict.fromkeys(range(8), OWNER), request_s=1.0)
    calls = []
    for shard in [*range(8), 0, 0]:
        calls += bench.call(shard)
        await asyncio.sleep(0.05)
    assert len(bench.sent) == AT_ONCE
    await asyncio.gather(*calls)
    assert sorted(shard for _, shards in bench.requests for shard in shards) == [0, 0, 0, *range(1, 8)]
    await bench.calls.stop()


@run_by(run)
async def test_the_next_request_to_an_owner_begins_after_a_moment_or_with_the_last_answer() -> None:
    """The moment counts from the last that has begun; of another owner nothing is waited for."""
    bench = Bench({0: OWNER, 1: OWNER, 2: OTHER}, request_s=1.0)
    for shard in range(3):
        bench.call(shard)
        await asyncio.sleep(STAGGER_S / 4)
    assert bench.requests == [("b", [0]), ("c", [2])]
    await asyncio.gather(*bench.calls.waiting())
    assert bench.requests[2:] == [("b", [1])]
    assert bench.sent[2][0] - bench.sent[0][0] == pytest.approx(STAGGER_S, abs=1e-6)
    now_s = asyncio.get_running_loop().time()
    bench.call(0)
    await asyncio.sleep(STAGGER_S / 4)
    assert bench.sent[3][0] == now_s
    await bench.calls.stop()


@run_by(run)
async def test_the_shards_of_a_request_that_had_a_fault_rest() -> None:
    """The fault is logged. They are asked for after a pause, and not again in every turn of the loop."""
    bench = Bench({0: OWNER}, request_s=0.0)
    bench.error = KeyError(1)
    (call,) = bench.call(0)
    await asyncio.sleep(FAULT_PAUSE_S - 0.1)
    assert len(bench.sent) == 1
    bench.error = None
    await call
    (record,) = bench.log.records
    assert (record.event, record.fields["error"]) == ("exchange_service_failed", "KeyError(1)")
    await bench.calls.stop()


@pytest.mark.parametrize("lacks_answers", [False, True])
@run_by(run)
async def test_a_failed_request_is_sent_again_after_rests_that_grow(lacks_answers: bool) -> None:
    """The owner is reported, and asked about, each time; rests double up to their limit, and begin anew after an
    answer. An answer that lacks some results is a failure of the whole request."""
    bench = Bench({0: OWNER}, request_s=0.0)
    error = TransportError("timeout", OWNER.address, "no answer")
    bench.error, bench.answers_lost = (None, 1) if lacks_answers else (error, 0)
    (call,) = bench.call(0)
    await asyncio.sleep(5.0)
    rests = [later - earlier for (earlier, *_), (later, *_) in pairwise(bench.sent)]
    for number, rest in enumerate(rests):
        wanted = min(FIRST_RETRY_S * 2**number, MAX_RETRY_S)
        assert 0.5 * wanted - 1e-9 <= rest <= 1.5 * wanted + 1e-9
    assert len(bench.directory.failures) >= len(bench.directory.refreshed) > 8
    assert set(bench.directory.failures) == {OWNER.node_id}
    assert bench.directory.refreshed[0] == [0]

    bench.error, bench.answers_lost = None, 0
    await call
    bench.error = error
    before = len(bench.sent)
    bench.call(0)
    await asyncio.sleep(1.5 * FIRST_RETRY_S + 0.001)
    assert len(bench.sent) >= before + 2
    await bench.calls.stop()


@run_by(run)
async def test_a_shard_that_was_not_answered_rests_alone() -> None:
    """The others of its request are free at once; one whose owner is at work is asked for again at once."""
    bench = Bench({0: OWNER, 1: OWNER, 2: OWNER}, request_s=0.01)
    bench.moving, bench.later = [0], [1]
    bench.call(0, 1, 2)
    await asyncio.sleep(0.0105)
    assert bench.requests == [("b", [0, 1, 2]), ("b", [1])]
    bench.moving, bench.later = [], []
    await asyncio.gather(*bench.calls.waiting())
    assert bench.directory.failures == []
    await bench.calls.stop()


@run_by(run)
async def test_a_call_that_is_forgotten_is_not_sent_again_and_the_end_fails_the_others() -> None:
    """A caller that has given up leaves nothing behind."""
    bench = Bench({0: OWNER, 1: OWNER})
    bench.moving = [0, 1]
    gone, waits = bench.call(0, 1)
    await asyncio.sleep(1.0)
    gone.cancel()
    bench.calls.forget(0, gone)
    await asyncio.sleep(2 * MAX_RETRY_S)
    assert bench.requests[-1] == ("b", [1])
    await bench.calls.stop()
    with pytest.raises(StoreUnavailable):
        await waits
