"""`p2pnode.engine("server")`, as the script of a server uses it: over a real socket, with the daemon's side in a
thread, a store in memory, and a worker that runs its real loop beside the daemon."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

import pytest

import p2pnode
from p2pnode.overlay.peers import Activity
from p2pnode.training.engines.program import VerbFailed
from p2pnode.training.engines.server import messages
from p2pnode.training.engines.server.acceptance import ServerOptions
from p2pnode.training.engines.server.engine import ParameterServer
from p2pnode.training.engines.server.program import ServerVerbs, UpdatesLost
from p2pnode.training.engines.server.record import RECORD_KEY, Pending, ServerRecord, encode_record
from p2pnode.training.engines.server.worker import run_worker
from p2pnode.training.trainer_link.engine_messages import MembersFound, TaskCounts
from tests.harness.stubs.engine_daemon import NODE_ID, EngineDaemon, engine_daemon
from tests.harness.swarms.server_swarm import TableSurroundings

__all__ = ["engine_daemon"]

WORKER, SERVER = b"w" * 20, b"s" * 20


class Worker:
    """The host of one worker, in the daemon's thread."""

    node_id = WORKER
    is_stopping = False

    def __init__(self, daemon: EngineDaemon) -> None:
        self.store = daemon.values.store
        self.surroundings = TableSurroundings({})
        self._calls = daemon.calls

    def clock(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        raise AssertionError(f"the server answers, and the worker waits {seconds} s")

    async def members(self, nodes: Sequence[bytes] = ()) -> MembersFound:
        return MembersFound([NODE_ID], [])

    async def announce(self, step: int) -> None:
        """Nobody else is there."""

    async def call(self, node: bytes, payload: bytes) -> bytes:
        assert node == NODE_ID
        return await self._calls.call(WORKER, payload)

    async def run(self, work: Callable[[], Any]) -> Any:
        return work()

    @asynccontextmanager
    async def beside(self, work: Any, every_s: float) -> AsyncIterator[None]:
        yield


@pytest.fixture
def engine(engine_daemon: EngineDaemon) -> Iterator[ParameterServer]:
    with p2pnode.engine("server") as found:
        yield found


def works(daemon: EngineDaemon, push: Callable[..., Any], run: int = 1, **options: Any) -> Future[Any]:
    """A worker with this `push`, until the run is over."""
    verbs = ServerVerbs()
    verbs.register_push(push)
    return daemon.run(run_worker(verbs, Worker(daemon), ServerOptions(**options), run))  # type: ignore[arg-type]


def counting(engine: ParameterServer, updates: int = 3) -> None:
    engine.register_schedule(lambda _ctx, workers: {worker: ["n", ("by", 2)] for worker in workers})
    engine.register_pull("add")
    engine.register_stop(lambda ctx: ctx.version >= updates)


def test_the_key_of_the_record_is_none_of_the_script(engine_daemon: EngineDaemon, engine: ParameterServer) -> None:
    """It is not listed, and cannot be set."""
    engine_daemon.run(engine_daemon.values.store.set(RECORD_KEY, encode_record(ServerRecord()))).result(10.0)
    engine.set(b"data", {"a": [1, 2.5, "x"]})

    assert engine.get(b"data") == ({"a": [1, 2.5, "x"]}, 0)
    assert engine.keys() == [b"data"]
    with pytest.raises(ValueError, match="belongs to the engine"):
        engine.set(RECORD_KEY, 1)


def test_a_node_knows_its_role_and_who_works(engine_daemon: EngineDaemon, engine: ParameterServer) -> None:
    """Servers are no workers; one that has not begun yet counts for nobody."""
    assert engine.is_server
    assert engine.node_id == NODE_ID.hex()
    for servers, workers in (([NODE_ID], 0), ([], 1), ([NODE_ID, SERVER], 0)):
        engine_daemon.calls.servers = servers
        assert engine.worker_num == workers


def test_a_node_that_is_no_server_works(engine_daemon: EngineDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks the server for a task, with the options and the number of its start, and hears of the end."""
    polls: list[tuple[bytes, str, int]] = []

    async def call(node: bytes, payload: bytes) -> bytes:
        poll = messages.decode_poll(payload)
        polls.append((node, poll.settings, poll.run))
        return messages.encode(messages.Told(1, SERVER, ended="stopped"))

    engine_daemon.calls.servers = [SERVER]
    monkeypatch.setattr(engine_daemon.calls, "call", call)
    with p2pnode.engine("server") as engine:
        assert not engine.is_server
        assert engine.start(barrier="pssp", staleness=2, sample=5, min_workers=3) == 0
        assert engine.start() == 0
    first = ServerOptions(barrier="pssp", staleness=2, sample=5, min_workers=3)
    assert polls == [(SERVER, first.text(), 1), (SERVER, ServerOptions().text(), 2)]


def test_without_a_task_a_run_may_end_at_once(engine_daemon: EngineDaemon, engine: ParameterServer) -> None:
    """No value, no task and no update: its version is 0, and no key is there."""
    engine.register_stop(lambda _ctx: True)
    worker = works(engine_daemon, lambda ctx, params: [])

    assert engine.start() == 0
    assert worker.result(10.0) == 0
    assert engine.keys() == []


def test_tasks_go_to_the_worker_and_updates_into_the_values(
    engine_daemon: EngineDaemon, engine: ParameterServer
) -> None:
    """A key comes with its value, or None, and a pair as it is; every update counts once, also in a second run. The
    status has the end of each run at once."""
    seen: list[Any] = []
    counting(engine)

    def push(ctx: Any, params: Any) -> Any:
        seen.append((ctx.step, ctx.worker_num, params))
        return [("n", params[1][1])]

    worker = works(engine_daemon, push)
    assert engine.start() == 3
    assert worker.result(10.0) == 3
    assert engine.get("n") == (6, 3)
    assert seen == [(step, 1, [("n", 2 * (step - 1) or None), ("by", 2)]) for step in (1, 2, 3)]
    assert engine_daemon.tasks() == TaskCounts(3, 1, given=3, done=3, held=0, waiting=0, again=0, refused=0)

    engine.register_stop(lambda ctx: ctx.version >= 5)
    worker = works(engine_daemon, push, run=2)
    assert engine.start() == 5
    assert worker.result(10.0) == 2
    assert engine.get("n") == (10, 5)


@pytest.mark.parametrize("verb", ["schedule", "pull", "stop", "barrier", "push"])
def test_an_error_in_a_function_ends_start_and_leaves_the_engine(
    engine_daemon: EngineDaemon, engine: ParameterServer, verb: str
) -> None:
    """It names the function, and its key where it has one; values can be used, and `start` be called again."""

    def fails(*_: object) -> Any:
        raise RuntimeError("no disk")

    counting(engine)
    if verb != "push":
        getattr(engine, f"register_{verb}")(fails)
    worker = works(engine_daemon, fails if verb == "push" else lambda ctx, params: [("n", 1)])

    with pytest.raises(VerbFailed, match=f"^{verb}.* failed at node .*no disk") as caught:
        engine.start()
    assert caught.value.keys == {"pull": ("n",), "push": ("n", "by")}.get(verb, ())
    assert isinstance(worker.exception(10.0), VerbFailed)
    assert engine_daemon.swarm.activities[-1] is Activity.PAUSED

    engine.set("n", 40)
    counting(engine, engine.get("n").timestamp + 2)
    engine.barrier = None
    worker = works(engine_daemon, lambda ctx, params: [("n", 1)], run=2)
    version = engine.start()
    assert engine_daemon.swarm.activities[-1] is Activity.FINISHED
    assert engine.get("n").value == 40 + worker.result(10.0) > 40
    assert engine.get("n").timestamp == version


def test_options_that_cannot_be_are_refused_before_anything_begins(
    engine_daemon: EngineDaemon, engine: ParameterServer
) -> None:
    """The error says which."""
    with pytest.raises(ValueError, match="grads_to_wait needs barrier"):
        engine.start(grads_to_wait=2)
    assert engine_daemon.swarm.activities == [Activity.PAUSED]


def test_lost_updates_end_start_at_server_and_worker(engine_daemon: EngineDaemon, engine: ParameterServer) -> None:
    """A server that died in a commit whose worker nobody knows: the run goes on to its end, and then says so."""
    dead = ServerRecord(
        epoch=1, server=b"d" * 20, run=1, version=1, pending=[Pending(WORKER, 2, (7, 1))], pending_version=2
    )
    engine_daemon.run(engine_daemon.values.store.set(RECORD_KEY, encode_record(dead), 2)).result(10.0)
    counting(engine, 4)
    worker = works(engine_daemon, lambda ctx, params: [("n", 1)])

    with pytest.raises(UpdatesLost, match=r"ended at version 4, and 1 update may be missing in its values") as caught:
        engine.start()
    assert caught.value.count == 1
    assert engine_daemon.swarm.activities[-1] is Activity.FINISHED, "others may read the values"
    assert isinstance(worker.exception(10.0), UpdatesLost)
    assert engine.get("n") == (2, 4)
