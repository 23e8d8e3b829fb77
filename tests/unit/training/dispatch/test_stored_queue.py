"""A queue with its store: one write for many requests, failed writes, masters that lose the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest

from p2pnode.training.dispatch import stored_queue
from p2pnode.training.dispatch.answers import (
    Answer,
    BadRequestToQueue,
    Cause,
    DatasetRegistered,
    Held,
    QueueEvent,
    QueueRules,
    Registration,
    ReportAnswer,
)
from p2pnode.training.dispatch.chunks import ChunkTable, DatasetChunk, DatasetDiffers
from p2pnode.training.dispatch.etcd_store import EtcdStore
from p2pnode.training.dispatch.open_store import BadStoreSetting, open_store
from p2pnode.training.dispatch.queue_rows import StateDamaged
from p2pnode.training.dispatch.sqlite_store import SqliteStore
from p2pnode.training.dispatch.store import StoreLost, StoreRefused
from p2pnode.training.dispatch.stored_queue import StoredQueue, recovered
from tests.harness.environment.memory_store import MemoryStore, StoreContents
from tests.harness.environment.simulated import InlineExecutor, ListLog, make_environment
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import played_by, run_by

TABLE = ChunkTable(DatasetChunk("data", index, 50 * index, 10) for index in range(100))
WANTED = Registration(identity=b"i" * 16, digest=b"", tasks=0, chunks_per_task=2, shuffle=False, seed=0)
RULES = QueueRules(passes=2, lease_floor_s=5, lease_ceiling_s=50, leases_per_worker=64)
ANN = b"ann"


class TroubledStore(MemoryStore):
    """A store in memory that takes a second for a write, and fails as it is told."""

    def __init__(self, contents: StoreContents | None = None) -> None:
        super().__init__(contents)
        self.trouble = ""
        self.writes = 0

    async def write(self, rows: Mapping[str, bytes]) -> None:
        trouble, self.trouble = self.trouble, ""
        await asyncio.sleep(1)
        if trouble == "lost before":
            raise StoreLost("gone")
        await super().write(rows)
        self.writes += 1
        if trouble == "lost after":
            raise StoreLost("gone")


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


@played_by(simulate)
async def test_requests_share_a_write() -> None:
    """Of 60 requests at once the first has a write of its own, and the others share the next two."""
    scene = await Scene.begin()
    before = scene.store.writes
    handouts = await asyncio.gather(*(scene.queue.get(b"%d" % number) for number in range(60)))
    tasks = [handout.lease.task for handout in handouts if handout.lease is not None]
    assert sorted(tasks) == list(range(50))
    assert [handout.answer for handout in handouts].count(Answer.NO_TASK_NOW) == 10
    assert scene.store.writes - before <= 3
    assert scene.events == [DatasetRegistered(50, 2)]
    await scene.queue.close()


@played_by(simulate)
async def test_nothing_shows_before_it_is_stored() -> None:
    """While the store writes, the status is that of before; then it has the lease."""
    scene = await Scene.begin()
    asking = asyncio.create_task(scene.queue.get(ANN))
    await asyncio.sleep(0.5)
    assert scene.queue.status().leased == 0
    await asking
    assert (scene.queue.status().leased, scene.queue.holders()) == (1, [ANN])
    await scene.queue.close()


@pytest.mark.parametrize("trouble", ["lost before", "lost after"])
@played_by(simulate)
async def test_a_lost_store_ends_the_service_and_a_repeat_is_answered_by_the_next_master(*, trouble: str) -> None:
    """Requests under way, those that wait, and later ones fail; the next master answers the repeat, counted once."""
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


@played_by(simulate)
async def test_two_first_registrations_at_once() -> None:
    """One of two different data sets wins, and its chunks are the ones that are stored."""
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


@played_by(simulate)
async def test_more_records_than_a_task_has_cannot_be_trained() -> None:
    """A report with an impossible number of trained records is an error, one with all of them is not."""
    scene = await Scene.begin()
    lease = (await scene.queue.get(ANN)).lease
    assert lease is not None
    with pytest.raises(BadRequestToQueue, match="which has 20"):
        await scene.queue.renew(ANN, [Held(lease.task, lease.attempt, 21)])
    with pytest.raises(BadRequestToQueue, match="which has 20"):
        await scene.queue.fail(ANN, lease.task, lease.attempt, Cause.ERROR, 21)
    assert await scene.queue.renew(ANN, [Held(lease.task, lease.attempt, 20)]) == [ReportAnswer.RENEWED]
    await scene.queue.close()


@played_by(simulate)
async def test_a_store_with_nonsense_is_not_served() -> None:
    """A missing or foreign list of chunks, an unreadable row, tasks of nothing: each is named and refused."""
    scene = await Scene.begin()
    await scene.queue.get(ANN)
    await scene.queue.close()
    rows = scene.store.contents.rows
    assert recovered(RULES, rows, 0.0)[0].tasks == 50
    foreign = ChunkTable([DatasetChunk("other", 0, 0, 1)]).encode()
    for state, reason in (
        ({key: row for key, row in rows.items() if not key.startswith("chunks/")}, "missing"),
        ({**rows, "chunks/0000": foreign}, "not the registered one"),
        ({**rows, "task/0": b"junk"}, "task/0 cannot be read"),
        ({key: row for key, row in rows.items() if key != "registration"}, "of 0 tasks"),
    ):
        with pytest.raises(StateDamaged, match=reason):
            recovered(RULES, state, 0.0)


@played_by(simulate)
async def test_a_flood_of_requests_is_refused(*, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound requests are refused at once, to be repeated; those before it are answered."""
    monkeypatch.setattr(stored_queue, "WAITING_REQUESTS", 5)
    scene = await Scene.begin()
    results = await asyncio.gather(*(scene.queue.get(b"%d" % n) for n in range(9)), return_exceptions=True)
    assert [isinstance(result, StoreRefused) for result in results] == [False] * 5 + [True] * 4
    await scene.queue.close()


@played_by(simulate)
async def test_a_master_notices_its_successor_without_being_asked() -> None:
    """Another master opens the store: the former one is lost within a second and answers nothing, not even reads."""
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


# -- from the setting `dispatch.store` to a store


@run_by(run)
async def test_settings_and_their_stores(tmp_path: Path) -> None:
    """The default is a file in the state directory; a path may be relative to it; etcd has several endpoints."""
    (tmp_path / "password").write_text("secret\n")
    environment = make_environment()
    for spec, path in (
        ("sqlite", tmp_path / "dispatch.sqlite"),
        ("sqlite:queues/one", tmp_path / "queues/one"),
        ("sqlite:/elsewhere/one", Path("/elsewhere/one")),
    ):
        store = open_store(spec, tmp_path, environment)
        assert isinstance(store, SqliteStore)
        assert store.path == path
    spec = f"etcd://ann@one:1,[::1]:2,three/runs/mine/?tls=true&password_file={tmp_path}/password&ttl_s=5"
    store = open_store(spec, tmp_path, environment)
    assert isinstance(store, EtcdStore)
    gateway = store._calls
    assert gateway._endpoints == ["https://one:1", "https://[::1]:2", "https://three:2379"]
    assert gateway._user == ("ann", "secret")
    assert store._key("head") == b"/runs/mine/head"
    plain = open_store("etcd://one/prefix", tmp_path, environment)
    assert isinstance(plain, EtcdStore)
    assert plain._calls._endpoints == ["http://one:2379"]
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("", "names no store"),
        ("redis://one", "names no store"),
        ("etcd://one", "no prefix"),
        ("etcd://one/", "no prefix"),
        ("etcd:///prefix", "no host and port"),
        ("etcd://one:port/prefix", "no host and port"),
        ("etcd://one,,two/prefix", "no host and port"),
        ("etcd://one/prefix?tsl=true", "unknown option tsl; known are ca"),
        ("etcd://one/prefix?tls=yes", "tls is true or false"),
        ("etcd://one/prefix?tls=false&ca=/x", "contradicts"),
        ("etcd://one/prefix?ca=/nowhere", "certificates cannot be read"),
        ("etcd://one/prefix?ttl_s=1", "from 2 to 3600"),
        ("etcd://one/prefix?ttl_s=nan", "from 2 to 3600"),
        ("etcd://one/prefix?ttl_s=soon", "from 2 to 3600"),
        ("etcd://ann:secret@one/prefix", "password_file"),
        ("etcd://ann@one/prefix", "a user needs a password_file"),
        ("etcd://one/prefix?password_file=/x", "a password_file a user"),
        ("etcd://ann@one/prefix?password_file=/nowhere", "password cannot be read"),
    ],
)
@run_by(run)
async def test_a_setting_that_names_no_store(spec: str, reason: str, tmp_path: Path) -> None:
    """Each is refused with what is wrong and what is right."""
    with pytest.raises(BadStoreSetting, match=reason):
        open_store(spec, tmp_path, make_environment())
    await asyncio.sleep(0)
