"""Training scripts in nodes of the simulated network: each is a function in a thread of this process.

It calls the real `p2pnode.attach`, over the real socket.

One thread computes at a time: the loop waits for a script's answer, and the script for the next order. So a swarm of
scripts has one history, whatever the machine's speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from p2pnode.training.trainer import attach
from p2pnode.training.trainer.connection import DaemonConnection
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.data_messages import DataFromDaemon, DataGranted, DataOpened, DataTrained, DataWanted
from p2pnode.training.trainer_link.engine_messages import EngineFromDaemon
from p2pnode.training.trainer_link.interface import (
    Evaluation,
    ModelDescription,
    Ranges,
    Restored,
    Resume,
    StepOrder,
    StepReport,
    TrainerEnd,
    TrainerFailed,
    TrainerHello,
    TrainerLeft,
    Vector,
)
from p2pnode.training.trainer_link.record_messages import RecordsGranted
from p2pnode.training.trainer_link.shared_memory import SharedVectors
from tests.harness.environment.virtual_loop import VirtualLoop
from tests.harness.swarms.swarm import Swarm
from tests.harness.trainers.stub_trainer import StubTrainer

Message = TypeVar("Message")

#: Virtual seconds of a step.
STEP_S = 0.1

#: What a script says of data that it shares.
DATA = (DataOpened, DataWanted, DataTrained)

LEAVES = "the script has called swarm.leave()"

#: Real seconds until a script that says nothing has failed.
ANSWER_S = 60.0


class ScriptTrainer(StubTrainer):
    """Implements `Trainer` with a script; what it returns is in `result`, and what the daemon heard in `heard`."""

    def __init__(self, name: str, script: Callable[[], Any], folder: Path) -> None:
        super().__init__(name, size=1, evaluates=False)
        self.is_script = True
        self.result: Any = None
        #: Whether it has called `swarm.leave()`.
        self._leaves = False
        #: Whether a turn is under way; set when it has taken the values that came meanwhile.
        self._trains = False
        self._entered = asyncio.Event()
        self.error = ""
        self.heard: list[Any] = []
        self.reports: list[StepReport] = []
        self._script = script
        self._path = folder / f"{name}.socket"
        self._memory: SharedVectors | None = None
        self._turn = 0
        self._granted = asyncio.Event()

    async def start(self, restore: str = "", *, resume: Resume | None = None) -> TrainerHello:
        self._set_state("starting")
        await asyncio.sleep(STEP_S)
        self._connect()
        self._send(messages.Start("", "", {}, "auto", 1, seed=3, node_seed=7, local_steps=1))
        hello = self._expect(messages.Hello).hello
        restored = Restored(has_vector=self._memory is not None, file=restore)
        if self._memory is None:
            self.layout, self._memory = hello.layout, SharedVectors(hello.layout.total)
            self.vector, self.delta = self._memory.vector, self._memory.delta
            if resume is not None:
                restored = await resume(hello, self.vector)
        memory = messages.Memory(self.layout.total, initialise=not restored.has_vector, restore=restored.file)
        socket.send_fds(self._socket, [messages.encode(memory)], self._memory.descriptors)
        self._expect(messages.Ready)
        self._set_state("running")
        return hello

    async def train(self, order: StepOrder) -> StepReport:
        if order.local_steps:
            await asyncio.sleep(STEP_S)
        if self._leaves:
            raise TrainerLeft(LEAVES)
        self._turn += 1
        self._send(messages.Train(self._turn, order))
        self._trains = True
        report = await self._trained()
        self._trains = False
        if order.local_steps:
            self.reports.append(report)
            self.trained.append(order.step)
        return report

    def encoded(self) -> None:
        self._send(messages.DeltaEncoded())

    async def arrived(
        self, step: int, keeps_base: Ranges = (), takes_back: Ranges = (), adds_delta: Ranges = ()
    ) -> None:
        if self._state != "running":
            return
        self._send(messages.ValuesArrived(step, list(keeps_base), list(takes_back), list(adds_delta)))
        if self._trains:  # it waits for data, and takes the values at its next optimiser step
            self._entered.clear()
            await self._entered.wait()
        else:
            self._expect(messages.ValuesEntered)

    async def _trained(self) -> StepReport:
        """The report of the turn. Meanwhile the script may ask for data, and other nodes have to answer this one."""
        while True:
            message = self._expect((messages.Trained, messages.ValuesEntered, *DATA))
            if isinstance(message, messages.Trained):
                return message.report
            if isinstance(message, messages.ValuesEntered):
                self._entered.set()
                continue
            self.send_to_daemon(message)
            if isinstance(message, DataWanted):
                await self._granted.wait()
                self._granted.clear()

    def send_data(self, message: DataFromDaemon | RecordsGranted | EngineFromDaemon) -> None:
        if self._state == "running":
            self._send(message)
            if isinstance(message, DataGranted):
                self._granted.set()

    async def describe(self, folder: str, *, wait: bool = False) -> ModelDescription:
        self._turn += 1
        self._send(messages.Describe(self._turn, folder, wait))
        return self._expect(messages.Described).description

    async def finish(self, reason: str, finish_s: float) -> TrainerEnd:
        return self._dismiss(messages.RunEnded(reason, finish_s))

    async def stop(self, stop_s: float = 0.0) -> TrainerEnd:
        return self._dismiss(messages.Stop(stop_s))

    def _dismiss(self, message: messages.FromDaemon) -> TrainerEnd:
        if self._state == "running":
            self._send(message)
            self._join()
        self._set_state("stopped")
        return TrainerEnd()

    # --- the thread ---------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Start the script and wait until it attaches."""
        self._path.unlink(missing_ok=True)
        attach._attached.pop(os.fspath(self._path), None)  # a process of its own would begin without
        self._decoder = messages.Decoder()
        self._inbox: list[Any] = []
        self._thread = threading.Thread(target=self._run, name=f"script of {self.name}", daemon=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.fspath(self._path))
            listener.listen()
            listener.settimeout(0.2)
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(messages.SOCKET_VARIABLE, os.fspath(self._path))
                patch.setattr(DaemonConnection, "connect", self._opened)
                self._thread.start()
                self._socket = self._accepted(listener)
        self._socket.settimeout(ANSWER_S)

    def _opened(self, path: str) -> DaemonConnection:
        """The script's end of the socket. A process would close it at its end; a thread does not."""
        end = socket.socket(socket.AF_UNIX)
        end.connect(path)
        self._script_end = end
        return DaemonConnection(end)

    def _accepted(self, listener: socket.socket) -> socket.socket:
        while self._thread.is_alive():
            try:
                return listener.accept()[0]
            except TimeoutError:
                continue
        raise TrainerFailed(f"the script of {self.name} ended before it attached: {self.error}", fatal=True)

    def _run(self) -> None:
        try:
            self.result = self._script()
        except BaseException:
            self.error = traceback.format_exc()
        finally:
            with contextlib.suppress(AttributeError, OSError):  # It has not attached, or the daemon has gone.
                self._script_end.shutdown(socket.SHUT_RDWR)

    def _join(self) -> None:
        self._thread.join(ANSWER_S)
        assert not self._thread.is_alive(), f"the script of {self.name} does not end"
        while data := self._socket.recv(1 << 16):
            self._inbox.extend(self._decoder.from_trainer(data))
        self.heard.extend(self._inbox)
        self._socket.close()
        self._script_end.close()

    # --- messages -----------------------------------------------------------------------------------------------

    def _send(self, message: messages.FromDaemon) -> None:
        self._socket.sendall(messages.encode(message))

    def _expect(self, kind: type[Message] | tuple[type[Message], ...]) -> Message:
        """The next message of these kinds; those before it go to `heard`. Raises `TrainerFailed`."""
        while True:
            while self._inbox:
                message = self._inbox.pop(0)
                if isinstance(message, kind):
                    return message
                if isinstance(message, messages.Measurement):
                    self.measured.append(Evaluation(message.step, message.metrics, message.samples))
                self.heard.append(message)
                if isinstance(message, messages.LeaveRequested):
                    self._leaves = True
                    if self._trains:
                        raise TrainerLeft(LEAVES)
            data = self._socket.recv(1 << 16)
            if not data:
                self._thread.join(ANSWER_S)
                self._set_state("crashed")
                raise TrainerFailed(f"the script of {self.name} has ended: {self.error or self.heard[-1:]}", fatal=True)
            self._inbox.extend(self._decoder.from_trainer(data))


class Together:
    """What `train_together` returns: the owners' values, and per node what its script returned and its trainer."""

    def __init__(self, value: Vector, trainers: dict[str, ScriptTrainer], swarm: Swarm) -> None:
        self.value = value
        self.trainers = trainers
        self.results = {name: trainer.result for name, trainer in trainers.items()}
        self.swarm = swarm


def train_together(scripts: dict[str, Callable[[], Any]], folder: Path, steps: int, **settings: Any) -> Together:
    """Run one script per node until each has made `steps` under bsp, which gives all the same weights at the end."""
    trainers: dict[str, ScriptTrainer] = {}
    found: list[Together] = []

    def make(name: str) -> ScriptTrainer:
        trainers[name] = ScriptTrainer(name, scripts[name], folder)
        return trainers[name]

    async def main() -> None:
        chosen = {
            "barrier.method": "bsp",
            "training.min_nodes": len(scripts),
            "training.max_steps": steps,
            "training.linger_s": 5.0,
            "exchange.shards": 4,
            "exchange.codec": "float32",
            **settings,
        }
        swarm = Swarm(seed=5, settings=chosen, make_trainer=make)
        for name in scripts:
            swarm.start(name, bootstrap=next(iter(swarm.hosts), None))
        hosts = list(swarm.hosts.values())
        tasks = [host.task for host in hosts if host.task is not None]

        def passed() -> bool:
            for task in tasks:
                if task.done():
                    task.result()
            return all(host.exchange is not None and host.exchange.run.passed_step >= steps for host in hosts)

        def left() -> bool:
            return all(task.done() for task in tasks)

        await swarm.until(lambda: passed() or left(), within_s=600, what="the last barrier")
        # Without owners it is what the last node had.
        value = np.array(next(iter(trainers.values())).vector if left() else swarm.model())
        await swarm.until(lambda: all(task.done() for task in tasks), within_s=600, what="the end of the run")
        for task in tasks:
            task.result()
        for trainer in trainers.values():
            assert not trainer.error, trainer.error
        found.append(Together(value, trainers, swarm))

    VirtualLoop().run(main(), limit_s=3600)
    return found[0]
