"""`p2pnode.engine("p2p")`, as a script uses it: over a real socket, with the daemon's side in a thread and a store in
memory."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import p2pnode
from p2pnode.overlay.peers import Activity
from p2pnode.training.engines import script_service
from p2pnode.training.engines.link import NoNode
from p2pnode.training.engines.peer import PeerToPeer
from p2pnode.training.engines.program import NoSuchValue, VerbFailed
from p2pnode.training.trainer_link import messages
from p2pnode.training.values.encoding import InvalidKey, ValueNotEncodable
from p2pnode.training.values.store import StoreUnavailable, UpdateFailed
from tests.harness.stubs.engine_daemon import NODE_ID, EngineDaemon, engine_daemon

__all__ = ["engine_daemon"]


@pytest.fixture
def engine(engine_daemon: EngineDaemon) -> Iterator[PeerToPeer]:
    with p2pnode.engine("p2p") as found:
        yield found


def test_values_are_set_and_got_with_their_timestamps(engine: PeerToPeer) -> None:
    """Arrays and plain data come back as they were; a value set outside of a run has the node's step."""
    engine.set(b"data", {"a": [1, 2.5, "x"]})
    engine.set("array", np.arange(6, dtype=np.int16).reshape(2, 3))

    value, timestamp = engine.get("array")
    assert value.dtype == np.int16
    assert value.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert timestamp == 0
    assert engine.get(b"data").value == {"a": [1, 2.5, "x"]}
    assert engine.keys() == ["array", b"data"]
    assert engine.get("none", 7) == (7, 0)
    with pytest.raises(NoSuchValue, match="the key 'none' has no value"):
        engine.get("none")


def test_no_value_at_all(engine: PeerToPeer) -> None:
    """Without values there are no keys, and a program without functions can be stopped at once."""
    engine.register_stop(lambda _ctx: True)

    assert engine.keys() == []
    assert engine.start() == 0
    assert engine.worker_num == 1
    assert engine.node_id == NODE_ID.hex()


def test_what_cannot_be_sent_is_named(engine: PeerToPeer) -> None:
    """A value that cannot be encoded is named by its key, and a wrong key by itself; the engine stays usable."""
    told = r"the value of 'w' cannot be encoded: .* or a list or dict of such: convert"
    with pytest.raises(ValueNotEncodable, match=told):
        engine.set("w", socket)
    with pytest.raises(ValueNotEncodable, match=r"the value of 'w' .* bytes"):
        engine.set("w", b"x" * (1 << 21))
    with pytest.raises(InvalidKey, match="1 to 256 bytes"):
        engine.get("k" * 300)
    engine.register_push(lambda _ctx, _params: [("good", 1), ("bad", object())])
    with pytest.raises(ValueNotEncodable, match="'bad'"):
        engine.start()
    assert engine.keys() == []
    engine.set("w", 1)
    assert engine.get("w").value == 1


def test_large_values_pass_the_socket(engine: PeerToPeer) -> None:
    """Many values of a megabyte, more than a socket or a message holds, are set, updated and got."""
    arrays = {f"k{number}": np.full(100_000, float(number)) for number in range(12)}
    for key, array in arrays.items():
        engine.set(key, array)
    engine.register_schedule(lambda _ctx: list(arrays))
    engine.register_push(lambda _ctx, params: params)
    engine.register_pull("add")
    engine.register_stop(lambda ctx: ctx.step == 1)

    assert engine.start() == 1
    for key, array in arrays.items():
        assert (engine.get(key).value == 2 * array).all()


def test_many_keys_are_listed_in_pages(
    engine_daemon: EngineDaemon, engine: PeerToPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, each once, text first; also where the last page is full."""
    monkeypatch.setattr(script_service, "KEYS_OF_A_PAGE", 100)
    for count in (100, 150, 200):
        for number in range(count):
            engine_daemon.values.store._values[b"b%03d" % number] = b"\x01", 0
            engine_daemon.values.store._values[b"s%03d" % number] = b"\x01", 0

        text = [f"{number:03d}" for number in range(count)]
        assert engine.keys() == [*text, *(key.encode() for key in text)]


def test_a_program_runs_to_its_end(engine_daemon: EngineDaemon, engine: PeerToPeer) -> None:
    """Verbs are called in order, `pull` gets the updates with the sender's step, and what it returns is the value."""
    calls: list[str] = []
    threads: dict[str, str] = {}

    @engine.register_schedule
    def schedule(ctx: p2pnode.Context) -> list[str]:
        calls.append(f"schedule {ctx.step}")
        return ["a", "b"]

    @engine.register_push
    def push(ctx: p2pnode.Context, params: list[tuple[Any, Any]]) -> list[tuple[Any, int]]:
        calls.append(f"push {params}")
        threads["push"] = threading.current_thread().name
        return [(key, 10) for key, _ in params]

    @engine.register_pull
    def pull(ctx: p2pnode.Context, updates: Any) -> list[tuple[Any, Any, int]]:
        threads["pull"] = threading.current_thread().name
        return [(one.key, ctx.get(one.key, 0).value + one.value, one.timestamp) for one in updates]

    @engine.register_stop
    def stop(ctx: p2pnode.Context) -> bool:
        return ctx.step == 2

    assert engine.start() == 2
    assert calls == ["schedule 0", "push [('a', None), ('b', None)]", "schedule 1", "push [('a', 10), ('b', 10)]"]
    assert [engine.get(key) for key in "ab"] == [(20, 2), (20, 2)]
    assert threads == {"push": "MainThread", "pull": "p2pnode-pull"}
    assert engine_daemon.swarm.activities == [Activity.PAUSED, Activity.READY, Activity.TRAINING, Activity.FINISHED]
    assert all(callable(one) for one in (schedule, push, pull, stop))


@pytest.mark.parametrize("verb", ["schedule", "push", "barrier", "stop"])
def test_an_error_in_a_function_ends_start_and_leaves_the_engine(
    verb: str, engine_daemon: EngineDaemon, engine: PeerToPeer
) -> None:
    """It names verb, node and step; values can be used, and a program without the fault can be started."""

    def wrong(*_: Any) -> Any:
        raise KeyError("no such column")

    engine.set("w", 1)
    getattr(engine, f"register_{verb}")(wrong)

    with pytest.raises(VerbFailed, match=rf"^{verb} failed at node {NODE_ID.hex()[:8]} in step 0: KeyError"):
        engine.start()

    assert engine_daemon.swarm.activities[-1] is Activity.PAUSED
    assert engine.get("w").value == 1

    class Right(p2pnode.Program):
        def stop(self, ctx: p2pnode.Context) -> bool:
            return ctx.step == 2

    assert engine.start(Right()) == 2


def test_a_pull_that_raises_names_the_key_and_keeps_the_others(engine: PeerToPeer) -> None:
    """Of a batch only the updates of the key that raises are refused; the sender hears which, where and why."""

    def pull(ctx: p2pnode.Context, updates: Any) -> list[tuple[Any, Any, int]]:
        return [(one.key, 1 // one.value, one.timestamp) for one in updates]

    engine.register_push(lambda _ctx, _params: [("a", 1), ("b", 0), ("c", 1)])
    engine.register_pull(pull)
    what = rf"the update of 'b' failed at node {NODE_ID.hex()}: pull failed: ZeroDivisionError.*test_peer.py, line \d+"
    with pytest.raises(UpdateFailed, match=what):
        engine.start()

    assert engine.keys() == ["a", "c"]


def test_pull_sets_nothing_and_returns_what_can_be_sent(engine: PeerToPeer) -> None:
    """A `pull` that sets a value, or returns one that cannot be encoded, is refused like one that raises."""
    engine.register_push(lambda _ctx, _params: [("a", 1)])

    def sets(ctx: p2pnode.Context, updates: Any) -> list[tuple[Any, Any, int]]:
        ctx.set("other", 1)
        return []

    engine.register_pull(sets)
    with pytest.raises(UpdateFailed, match="pull returns new values; it does not set 'other'"):
        engine.start()
    engine.register_pull(lambda _ctx, _updates: [("a", socket, 1)])
    with pytest.raises(UpdateFailed, match="the value of 'a' cannot be encoded"):
        engine.start()
    assert engine.keys() == []


def test_a_node_that_leaves_ends_start_early(engine_daemon: EngineDaemon, engine: PeerToPeer) -> None:
    """`start` returns after the step under way, without waiting for others, and the values can still be read."""
    engine.register_push(lambda _ctx, _params: [("n", 1)])
    engine.register_pull("add")

    def leave() -> None:
        while not engine.keys():
            time.sleep(0.001)
        engine_daemon.tell(messages.Stop(10.0))
        engine_daemon.release()

    thread = threading.Thread(target=leave)
    thread.start()
    steps = engine.start()
    thread.join()

    assert steps >= 1
    assert engine.get("n").value == steps


def test_a_daemon_that_has_ended_is_an_error(engine_daemon: EngineDaemon, engine: PeerToPeer) -> None:
    """A script whose node has ended hears so in the next call, and in one that is under way."""
    engine.set("n", 1)
    engine_daemon.stop()

    with pytest.raises(NoNode, match="the p2pnode daemon has ended"):
        engine.get("n")
    with pytest.raises(NoNode, match="the p2pnode daemon has ended"):
        engine.start()


def test_an_owner_that_does_not_answer_is_an_error(
    engine_daemon: EngineDaemon, engine: PeerToPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`StoreUnavailable` of the daemon's store comes through, and the next call is answered."""

    async def unavailable(_keys: Any) -> Any:
        raise StoreUnavailable("no owner of 'n' answered within 30 s")

    with monkeypatch.context() as broken:
        broken.setattr(engine_daemon.values, "get_encoded", unavailable)
        with pytest.raises(StoreUnavailable, match="no owner of 'n' answered"):
            engine.get("n")
    assert engine.get("n", 0) == (0, 0)


def test_a_barrier_is_asked_for_by_name(engine_daemon: EngineDaemon) -> None:
    """The daemon hears of the barrier that the script names; another name is an error before."""
    with pytest.raises(ValueError, match="there is no barrier 'psp'; there are asp, bsp, ssp, pbsp, pssp"):
        p2pnode.engine("p2p", barrier="psp")  # type: ignore[call-overload]
    with p2pnode.engine("p2p", barrier="pssp", staleness=2, sample=3):
        opened = engine_daemon.opened
    assert opened is not None
    assert (opened.kind, opened.method, opened.staleness, opened.sample) == ("p2p", "pssp", 2, 3)
