"""A queue with its store: one entry for many requests, failed writes, masters that lose the store, snapshots."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.harness.environment.simulated import InlineExecutor, ListLog, make_environment
from tests.harness.environment.virtual_loop import run
from training.dispatch import stored_queue
from training.dispatch.answers import (
    Answer,
    BadRequestToQueue,
    Cause,
    DatasetRegistered,
    Held,
    LeaseEnded,
    QueueEvent,
    QueueRules,
    Registration,
    ReportAnswer,
)
from training.dispatch.changes import StateDamaged
from training.dispatch.chunks import ChunkTable, DatasetChunk, DatasetDiffers, digest_of
from training.dispatch.store import MemoryStore, StoreContents, StoredQueueState, StoreLost, StoreRefused
from training.dispatch.stored_queue import StoredQueue, recovered

TABLE = ChunkTable(DatasetChunk("data", index, 50 * index, 10) for index in range(100))
WANTED = Registration(identity=b"i" * 16, digest=b"", tasks=0, chunks_per_task=2, shuffle=False, seed=0)
RULES = QueueRules(passes=2, lease_floor_s=5, lease_ceiling_s=50, leases_per_worker=64)
ANN = b"ann"


class TroubledStore(MemoryStore):
    """A store in memory that takes a second for a write, and fails as it is told."""

    def __init__(self, contents: StoreContents | None = None) -> None:
        super().__init__(contents)
        self.trouble = ""
        self.snapshot_fault: Exception | None = None

    async def append(self, entry: bytes) -> None:
        trouble, self.trouble = self.trouble, ""
        await asyncio.sleep(1)
        if trouble == "refused":
            raise StoreRefused("no space")
        if trouble == "lost before":
            raise StoreLost("gone")
        await super().append(entry)
        if trouble == "lost after":
            raise StoreLost("gone")

    async def write_snapshot(self, snapshot: bytes, entries: int) -> None:
        await asyncio.sleep(3.5)
        if self.snapshot_fault is not None:
            fault, self.snapshot_fault = self.snapshot_fault, None
            raise fault
        await super().write_snapshot(snapshot, entries)


class Scene:
    """One queue on a troubled store."""

    def __init__(self, contents: StoreContents | None = None, rules: QueueRules = RULES) -> None:
        self.store = TroubledStore(contents)
        self.events: list[QueueEvent] = []
        self.log = ListLog([])
        environment = make_environment(executor=InlineExecutor(), log=self.log)
        self.queue = StoredQueue(self.store, rules, environment, self.events.append)

    @classmethod
    async def begin(cls, contents: StoreContents | None = None, rules: QueueRules = RULES) -> Scene:
        scene = cls(contents, rules)
        await scene.queue.open()
        await scene.queue.register(TABLE, WANTED)
        return scene


def simulate(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run(scenario(), strict=True)


def test_requests_share_an_entry() -> None:
    """Of 60 requests at once the first has an entry of its own, and the other 59 share the next one."""

    async def scenario() -> None:
        scene = await Scene.begin()
        before = len(scene.store.contents.entries)
        handouts = await asyncio.gather(*(scene.queue.get(b"%d" % number) for number in range(60)))
        tasks = [handout.lease.task for handout in handouts if handout.lease is not None]
        assert sorted(tasks) == list(range(50))
        assert [handout.answer for handout in handouts].count(Answer.NO_TASK_NOW) == 10
        assert len(scene.store.contents.entries) - before <= 2
        assert scene.events == [DatasetRegistered(50, 2)]
        await scene.queue.close()

    simulate(scenario)


def test_nothing_shows_before_it_is_stored() -> None:
    """While the store writes, status and holders are those of before; then they have the lease."""

    async def scenario() -> None:
        scene = await Scene.begin()
        asking = asyncio.create_task(scene.queue.get(ANN))
        await asyncio.sleep(0.5)
        assert (scene.queue.status().leased, scene.queue.holders()) == (0, [])
        await asking
        assert (scene.queue.status().leased, scene.queue.holders()) == (1, [ANN])
        await scene.queue.close()

    simulate(scenario)


def test_a_refused_write_fails_its_requests_and_changes_nothing() -> None:
    """Every request of the batch gets a retryable error, memory is as before, and a repeat succeeds."""

    async def scenario() -> None:
        scene = await Scene.begin()
        lease = (await scene.queue.get(ANN)).lease
        assert lease is not None
        scene.store.trouble = "refused"
        failed = await asyncio.gather(
            scene.queue.finish(ANN, lease.task, lease.attempt), scene.queue.get(b"bob"), return_exceptions=True
        )
        assert [type(error) for error in failed] == [StoreRefused, StoreRefused]
        assert scene.queue.status().leased == 1
        assert len(scene.events) == 1
        assert await scene.queue.finish(ANN, lease.task, lease.attempt) is ReportAnswer.ACCEPTED
        assert scene.queue.status().done == 1
        await scene.queue.close()

    simulate(scenario)


@pytest.mark.parametrize("trouble", ["lost before", "lost after"])
def test_a_lost_store_ends_the_service_and_a_repeat_is_answered_by_the_next_master(trouble: str) -> None:
    """Requests under way, those that wait, and later ones fail; the next master answers the repeat, counted once."""

    async def scenario() -> None:
        scene = await Scene.begin()
        lease = (await scene.queue.get(ANN)).lease
        assert lease is not None
        scene.store.trouble = trouble
        report = asyncio.create_task(scene.queue.finish(ANN, lease.task, lease.attempt))
        await asyncio.sleep(0.5)
        failed = await asyncio.gather(report, scene.queue.get(b"bob"), return_exceptions=True)
        assert [type(error) for error in failed] == [StoreLost, StoreLost]
        assert str(await scene.queue.lost()) == "gone"
        with pytest.raises(StoreLost):
            await scene.queue.get(ANN)
        await scene.queue.close()

        second = await Scene.begin(scene.store.contents)
        assert second.queue.status().done == (trouble == "lost after")
        assert await second.queue.finish(ANN, lease.task, lease.attempt) is ReportAnswer.ACCEPTED
        assert (second.queue.status().done, second.queue.status().leased) == (1, 0)
        await second.queue.close()

    simulate(scenario)


def test_a_master_notices_its_successor_without_being_asked() -> None:
    """Another master opens the store: the former one is lost within a second and answers nothing, not even reads."""

    async def scenario() -> None:
        first = await Scene.begin()
        second = await Scene.begin(first.store.contents)
        async with asyncio.timeout(1):
            assert "another master" in str(await first.queue.lost())
        with pytest.raises(StoreLost):
            await first.queue.renew(ANN, [])
        with pytest.raises(StoreLost):
            first.queue.agree(TABLE.summary())
        assert second.queue.epoch > first.queue.epoch
        await first.queue.close()
        await second.queue.close()

    simulate(scenario)


def test_leases_end_without_a_request() -> None:
    """A lease whose time is over is returned when it is, and the event says so; a restart gives it its full time."""

    async def scenario() -> None:
        scene = await Scene.begin()
        await scene.queue.get(ANN)
        await asyncio.sleep(40)
        scene.store.epoch = 0  # killed
        second = await Scene.begin(scene.store.contents)
        await asyncio.sleep(45)
        assert second.queue.status().leased == 1
        await asyncio.sleep(10)
        assert second.queue.status().leased == 0
        assert second.events == [LeaseEnded(0, 1, ANN, Cause.TIMEOUT)]
        await scene.queue.close()
        await second.queue.close()

    simulate(scenario)


def test_the_log_becomes_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long log is replaced while requests go on, and the next master has the same state from both."""
    monkeypatch.setattr(stored_queue, "LOG_ENTRIES", 10)

    async def scenario() -> None:
        scene = await Scene.begin()
        for _ in range(70):
            lease = (await scene.queue.get(ANN)).lease
            assert lease is not None
            await scene.queue.finish(ANN, lease.task, lease.attempt)
            assert len(scene.store.contents.entries) <= 20
        assert scene.store.contents.snapshot is not None
        status = scene.queue.status()
        assert (status.pass_number, status.done) == (2, 20)
        await scene.queue.close()
        second = await Scene.begin(scene.store.contents)
        assert second.queue.status() == status
        await second.queue.close()

    simulate(scenario)


@pytest.mark.parametrize("fault", [StoreRefused("no space"), ValueError("a bug")])
def test_a_snapshot_that_fails_is_logged_and_taken_again(fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log before it stays, requests go on, and the next one is taken when the log has grown on."""
    monkeypatch.setattr(stored_queue, "LOG_ENTRIES", 10)

    async def scenario() -> None:
        scene = await Scene.begin()
        scene.store.snapshot_fault = fault
        for number in range(25):
            lease = (await scene.queue.get(ANN)).lease
            assert lease is not None
            await scene.queue.finish(ANN, lease.task, lease.attempt)
            if number == 10:
                assert scene.store.contents.snapshot is None
        (record,) = scene.log.of("dispatch_snapshot_refused")
        assert record.fields["error"] in (str(fault), repr(fault))
        assert scene.store.contents.snapshot is not None
        await scene.queue.close()

    simulate(scenario)


def test_another_data_set_is_refused_by_name() -> None:
    """The error names the first difference; the same data set gets the first registration's settings."""

    async def scenario() -> None:
        scene = await Scene.begin()
        other = ChunkTable(DatasetChunk("data", index, 50 * index, 10) for index in range(99))
        with pytest.raises(DatasetDiffers, match="data has 99 chunks, the registered one has 100"):
            await scene.queue.register(other, WANTED)
        with pytest.raises(DatasetDiffers, match="99 chunks"):
            scene.queue.agree(other.summary())
        first = await scene.queue.register(
            TABLE, Registration(identity=b"j", digest=b"", tasks=0, chunks_per_task=9, shuffle=True, seed=4)
        )
        assert (first.tasks, first.chunks_per_task, first.shuffle) == (50, 2, False)
        assert first.digest == digest_of(TABLE.summary())
        assert scene.queue.table is TABLE
        await scene.queue.close()
        second = await Scene.begin(scene.store.contents)
        assert second.queue.table is not None
        assert second.queue.table[99] == DatasetChunk("data", 99, 4950, 10)
        await second.queue.close()

    simulate(scenario)


def test_two_first_registrations_at_once() -> None:
    """One of two different data sets wins, and its chunks are the ones that are stored."""

    async def scenario() -> None:
        scene = Scene()
        await scene.queue.open()
        with pytest.raises(BadRequestToQueue):
            scene.queue.agree([])
        other = ChunkTable([DatasetChunk("other", 0, 0, 1)])
        results = await asyncio.gather(
            scene.queue.register(TABLE, WANTED), scene.queue.register(other, WANTED), return_exceptions=True
        )
        assert isinstance(results[0], Registration)
        assert isinstance(results[1], DatasetDiffers)
        await scene.queue.close()
        second = await Scene.begin(scene.store.contents)
        assert second.queue.status().tasks == 50
        await second.queue.close()

    simulate(scenario)


def test_more_records_than_a_task_has_cannot_be_trained() -> None:
    """A report with an impossible number of trained records is an error, one with all of them is not."""

    async def scenario() -> None:
        scene = await Scene.begin()
        lease = (await scene.queue.get(ANN)).lease
        assert lease is not None
        with pytest.raises(BadRequestToQueue, match="which has 20"):
            await scene.queue.renew(ANN, [Held(lease.task, lease.attempt, 21)])
        with pytest.raises(BadRequestToQueue, match="which has 20"):
            await scene.queue.fail(ANN, lease.task, lease.attempt, Cause.ERROR, 21)
        assert await scene.queue.renew(ANN, [Held(lease.task, lease.attempt, 20)]) == [ReportAnswer.RENEWED]
        await scene.queue.close()

    simulate(scenario)


def test_a_store_with_nonsense_is_not_served() -> None:
    """A missing or foreign list of chunks, an unreadable snapshot, a log out of order: each is named and refused."""

    async def scenario() -> None:
        scene = await Scene.begin()
        await scene.queue.get(ANN)
        await scene.queue.close()
        kept = scene.store.contents
        entries = tuple(kept.entries)
        sound = StoredQueueState(kept.chunks, None, entries)
        assert recovered(RULES, sound)[0].tasks == 50
        foreign = ChunkTable([DatasetChunk("other", 0, 0, 1)]).encode()
        nonsense = [
            (StoredQueueState(None, None, entries), "missing"),
            (StoredQueueState(foreign, None, entries), "not the registered one"),
            (StoredQueueState(kept.chunks, b"\x93", entries), "snapshot cannot be read"),
            (StoredQueueState(kept.chunks, None, (*entries, b"junk")), "entry of the log cannot be read"),
            (StoredQueueState(kept.chunks, None, entries + entries[:1]), "second data set"),
            (StoredQueueState(kept.chunks, None, entries[1:]), "task 0"),
        ]
        for state, reason in nonsense:
            with pytest.raises(StateDamaged, match=reason):
                recovered(RULES, state)

    simulate(scenario)


def test_a_flood_of_requests_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound requests are refused at once, to be repeated; those before it are answered."""
    monkeypatch.setattr(stored_queue, "WAITING_REQUESTS", 5)

    async def scenario() -> None:
        scene = await Scene.begin()
        results = await asyncio.gather(*(scene.queue.get(b"%d" % n) for n in range(9)), return_exceptions=True)
        assert [isinstance(result, StoreRefused) for result in results] == [False] * 5 + [True] * 4
        await scene.queue.close()

    simulate(scenario)
