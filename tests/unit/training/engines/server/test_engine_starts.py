"""The parameter server as a script uses it, over a link whose daemon is the test."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from p2pnode.training.engines.program import NoSuchValue
from p2pnode.training.engines.server import engine as module
from p2pnode.training.engines.server.core import RECORD_KEY
from p2pnode.training.engines.server.engine import ParameterServer
from p2pnode.training.engines.server.options import ServerOptions
from p2pnode.training.engines.server.program import ServerProgram
from p2pnode.training.trainer_link.engine_messages import (
    AbandonRun,
    AskKeys,
    BeginRun,
    EngineReady,
    FinishRun,
    GetValues,
    KeysFound,
    ListMembers,
    ListPeers,
    MembersFound,
    PeerSteps,
    PullAsked,
    SetValue,
    ValuesFound,
)
from p2pnode.training.values.encoding import decode_key, decode_value, encode_key, encode_value
from p2pnode.training.values.store import StoreUnavailable

ME, SERVER = b"m" * 20, b"s" * 20


class Link:
    """A daemon with these servers and values."""

    is_stopping = False

    def __init__(self, *servers: bytes, workers: int = 3, **values: object) -> None:
        self.servers = list(servers)
        self.workers = workers
        self.values: dict[bytes, tuple[bytes, int]] = {
            encode_key(key): (encode_value(key, value), 4) for key, value in values.items()
        }
        self.asked: list[Any] = []
        self.pull: Any = None
        self.is_closed = False

    def ask(self, question: Any) -> Any:
        self.asked.append(question)
        match question:
            case ListMembers():
                return MembersFound(self.servers, [])
            case GetValues(keys):
                return ValuesFound([self.values.get(key) for key in keys])
            case ListPeers():
                return PeerSteps({}, self.workers)
            case SetValue(key, value, timestamp):
                self.values[key] = value, timestamp
        return None

    def ask_in_parts(self, question: Any) -> list[Any]:
        assert isinstance(question, AskKeys)
        return [KeysFound(list(self.values), True)]

    def on_pull(self, function: Any) -> None:
        self.pull = function

    def close(self) -> None:
        self.is_closed = True

    def runs(self) -> list[str]:
        """The messages of runs."""
        return [type(one).__name__ for one in self.asked if isinstance(one, BeginRun | AbandonRun | FinishRun)]


def engine_of(link: Any) -> ParameterServer:
    return ParameterServer(link, EngineReady(ME, 5, False, 0.1))


class Loops:
    """Stands for the loops of server and worker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, outcome: Any = 7) -> None:
        self.called: list[tuple[str, ServerOptions, int]] = []
        self.outcome = outcome
        for name in ("run_server", "run_worker"):
            monkeypatch.setattr(module, name, self.loop(name))

    def loop(self, name: str) -> Any:
        async def run(_verbs: Any, _host: Any, options: ServerOptions, number: int) -> int:
            self.called.append((name, options, number))
            if isinstance(self.outcome, BaseException):
                raise self.outcome
            return int(self.outcome)

        return run


@pytest.mark.parametrize(("servers", "loop"), [([SERVER], "run_worker"), ([ME, SERVER], "run_server")])
def test_a_node_runs_the_loop_of_its_role(servers: list[bytes], loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a run that it begins and finishes; each start has the next number."""
    loops, link = Loops(monkeypatch), Link(*servers)
    engine = engine_of(link)
    assert engine.is_server == (loop == "run_server")
    assert engine.start(barrier="pssp", staleness=2, sample=5, min_workers=3) == 7
    assert engine.start() == 7
    assert loops.called == [
        (loop, ServerOptions(barrier="pssp", staleness=2, sample=5, min_workers=3), 1),
        (loop, ServerOptions(), 2),
    ]
    assert link.runs() == ["BeginRun", "FinishRun"] * 2


@pytest.mark.parametrize("error", [StoreUnavailable("no owner"), KeyboardInterrupt(), asyncio.CancelledError()])
def test_a_run_that_fails_is_abandoned(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the script's to see, and it can start again; a node that stops need not be told."""
    loops, link = Loops(monkeypatch, error), Link(SERVER)
    engine = engine_of(link)
    with pytest.raises(type(error)):
        engine.start()
    assert link.runs() == ["BeginRun", "AbandonRun"]
    loops.outcome = 3
    assert engine.start() == 3
    assert loops.called[-1][2] == 2

    loops.outcome, link.is_stopping = error, True
    with pytest.raises(type(error)):
        engine.start()
    assert link.runs() == ["BeginRun", "AbandonRun", "BeginRun", "FinishRun", "BeginRun"]


def test_options_that_cannot_be_begin_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do they count as a start."""
    loops, link = Loops(monkeypatch), Link(SERVER)
    engine = engine_of(link)
    with pytest.raises(ValueError, match="no barrier 'fast'"):
        engine.start(barrier="fast")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        engine.start(colour="red")
    assert link.runs() == []
    engine.start()
    assert loops.called[0][2] == 1


def test_a_program_replaces_what_was_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one the registered functions stay from start to start."""
    Loops(monkeypatch)
    engine = engine_of(Link(SERVER))

    class Program(ServerProgram):
        def push(self, ctx: Any, params: Any) -> Any:
            return [("of the program", 1)]

    engine.register_push(lambda ctx, params: [("registered", 1)])
    engine.start()
    context: Any = engine._context
    assert [one.key for one in engine.pushed(context, [])] == ["registered"]
    engine.start(Program())
    assert [one.key for one in engine.pushed(context, [])] == ["of the program"]


def test_values_are_read_and_set_through_the_link() -> None:
    """A default stands for a value that there is not; the record of the servers is no key of the script."""
    link = Link(SERVER, weights=[1.0])
    link.values[encode_key(RECORD_KEY)] = (b"", 0)
    engine = engine_of(link)
    assert engine.get("weights") == ([1.0], 4)
    assert engine.get("bias", 0.5) == (0.5, 0)
    with pytest.raises(NoSuchValue):
        engine.get("bias")
    engine.set("bias", 2.5)
    assert decode_value(link.values[encode_key("bias")][0]) == 2.5
    assert engine.keys() == ["bias", "weights"]
    with pytest.raises(ValueError, match="belongs to the engine"):
        engine.set(RECORD_KEY, 1)


@pytest.mark.parametrize(("nodes", "servers", "workers"), [(5, 2, 3), (1, 2, 0), (3, 0, 3)])
def test_servers_are_no_workers(nodes: int, servers: int, workers: int) -> None:
    """All nodes that take part but the servers; a server that has not begun is not below zero."""
    link = Link(*[bytes([number]) * 20 for number in range(servers)], workers=nodes)
    assert engine_of(link).worker_num == workers


def test_a_batch_of_updates_is_pulled_by_the_program() -> None:
    """The daemon asks for it, whether a run is under way or not."""
    link = Link(ME)
    engine = engine_of(link)
    engine.register_pull(lambda ctx, updates: [(one.key, one.value * 10, 0) for one in updates])
    done = link.pull(PullAsked(3, [(encode_key("k"), encode_value("k", 4), 9, "pull")], {}))
    assert (done.number, done.failure) == (3, "")
    ((key, (value, timestamp)),) = done.values.items()
    assert (decode_key(key), decode_value(value), timestamp) == ("k", 40, 9)


def test_a_script_leaves_its_node_at_the_end_of_the_block() -> None:
    """It knows its id until then."""
    link = Link(SERVER)
    with engine_of(link) as engine:
        assert engine.node_id == ME.hex()
        assert not link.is_closed
    assert link.is_closed
