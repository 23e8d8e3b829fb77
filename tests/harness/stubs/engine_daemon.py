"""A daemon's side of an engine in a thread of this process, over a real socket: the real service and messages, a store
in memory, and a node that is alone. The test's own thread is the script."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.system import SystemClock
from p2pnode.training.barriers.predicates import make_barrier
from p2pnode.training.barriers.waiter import BarrierWaiter
from p2pnode.training.engines.participation import Participation
from p2pnode.training.engines.script_service import EngineService
from p2pnode.training.progress import Progress
from p2pnode.training.settings import BarrierSettings, TrainingSettings
from p2pnode.training.supervisor.trainer_socket import TrainerSocket
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.engine_messages import (
    CallAnswered,
    CallReceived,
    EngineOpened,
    EngineReady,
    EngineSaid,
    MembersFound,
    TaskCounts,
)
from p2pnode.training.values.client import key_order
from p2pnode.training.values.encoding import Key, decode_key, decode_value, encode_key, encode_value
from p2pnode.training.values.store import (
    EncodedPull,
    EncodedUpdate,
    EncodedValue,
    NewValue,
    PullFailed,
    Stamped,
    ValueUpdate,
)
from tests.harness.environment.simulated import NoLog
from tests.harness.stubs.scripted_swarm import ScriptedSwarm
from tests.harness.swarms.memory_values import MemoryValues

NODE_ID = bytes(range(20))


class EncodedMemory:
    """A `MemoryValues` as the service uses it."""

    def __init__(self) -> None:
        self.store = MemoryValues(node=NODE_ID.hex())

    async def get_encoded(self, keys: Sequence[bytes]) -> list[EncodedValue | None]:
        return [self.store._values.get(key) for key in keys]

    async def update_encoded(self, updates: Sequence[EncodedUpdate]) -> None:
        await self.store.update(
            [ValueUpdate(decode_key(key), decode_value(value), *rest) for key, value, *rest in updates]
        )

    async def list_keys(self) -> list[bytes]:
        return sorted(self.store._values, key=key_order)

    def on_pull(self, pull: EncodedPull | None) -> None:
        async def decoded(updates: Sequence[ValueUpdate], present: Mapping[Key, Stamped]) -> Sequence[NewValue]:
            assert pull is not None
            encoded = [EncodedUpdate(encode_key(key), encode_value(key, value), *rest) for key, value, *rest in updates]
            values = {encode_key(key): (encode_value(key, one.value), one.timestamp) for key, one in present.items()}
            try:
                found = await pull(encoded, values)
            except PullFailed as error:
                raise PullFailed(decode_key(error.key) if error.key else None, error.reason) from error
            return [NewValue(decode_key(key), decode_value(value), timestamp) for key, value, timestamp in found]

        self.store.pull = None if pull is None else decoded


class LoneServer:
    """The calls of a node that is the only server. `call` is one of a worker, to this node's script."""

    def __init__(self, send: Callable[[CallReceived], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[bytes]] = {}
        self.servers = [NODE_ID]

    def members(self, nodes: Sequence[bytes]) -> MembersFound:
        return MembersFound(self.servers, [])

    async def call(self, worker: bytes, payload: bytes) -> bytes:
        number = next(self._numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        self._send(CallReceived(number, worker, payload))
        return await answer

    def on_answer(self, answer: CallAnswered) -> None:
        self._open.pop(answer.number).set_result(answer.payload)

    def end(self) -> None:
        for waiting in self._open.values():
            waiting.cancel()


class EngineDaemon:
    """Listens at `path` for one script. `swarm.activities` lists what it announced."""

    def __init__(self, path: Path, method: str = "asp") -> None:
        self.path = path
        self.calls = LoneServer(self.send_data)
        self.swarm = ScriptedSwarm(Contact(NODE_ID, Address("10.0.0.1", 8468)))
        self.values = EncodedMemory()
        self.opened: EngineOpened | None = None
        self._settings = BarrierSettings(method=method)
        self._handler: Callable[[EngineSaid], None] | None = None
        self._socket: TrainerSocket | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._listener.setblocking(False)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="engine-daemon")
        self._thread.start()

    # -- the trainer, for the service

    def on_engine(self, handler: Callable[[EngineSaid], None]) -> None:
        self._handler = handler

    def send_data(self, message: Any) -> None:
        assert self._socket is not None
        self._socket.send(message)

    # -- control, from the test's thread

    def tell(self, message: Any) -> None:
        """Send a message to the script."""
        self._loop.call_soon_threadsafe(self.send_data, message)

    def run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run this in the daemon's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def tasks(self) -> TaskCounts | None:
        """What the script has said of its tasks."""
        return self._service.tasks

    def release(self) -> None:
        """The node leaves."""
        self._loop.call_soon_threadsafe(self._service.release)

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended with the script
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(10.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self._serve())
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._task)
        finally:
            self._listener.close()
            self._loop.close()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        connection, _ = await loop.sock_accept(self._listener)
        connection.setblocking(False)
        self._socket = TrainerSocket(connection)
        self.send_data(messages.Start("", "", {}, "cpu", 1, seed=1, node_seed=2, local_steps=1))
        clock = SystemClock()
        barrier = make_barrier(self._settings)
        waiter = BarrierWaiter(self.swarm, barrier, self._settings, clock)
        settings = TrainingSettings(linger_s=0.0)
        part = Participation(self.swarm, waiter, settings, Progress(), clock)
        self._service = EngineService(self, part, self.values, NoLog(), self.calls)
        try:
            async for message in self._socket.received():
                if isinstance(message, EngineOpened):
                    self.opened = message
                    self.send_data(EngineReady(NODE_ID, 5, barrier.synchronous, 0.001))
                elif isinstance(message, EngineSaid):
                    assert self._handler is not None
                    self._handler(message)
        finally:
            await self._service.stop()
            await self._socket.close()


@pytest.fixture
def engine_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineDaemon]:
    """A daemon for an engine of the calling test."""
    daemon = EngineDaemon(tmp_path / "link")
    monkeypatch.setenv(messages.SOCKET_VARIABLE, str(daemon.path))
    yield daemon
    daemon.stop()
