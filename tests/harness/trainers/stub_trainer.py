"""A trainer without a model: it takes virtual time and yields deltas that can be added up exactly.

Deltas are small multiples of 1/1024, so their sums are exact in float32 and in bfloat16. A test can check that the
swarm's vector has every delta exactly once. Faults: `crash_next`, `hang`/`resume`, `fail_start`. As a script:
`leave_after`, `finish_in`.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache

import msgspec
import numpy as np

from p2pnode.training.layout import Layout, LayoutEntry
from p2pnode.training.trainer_link.data_messages import DataFromDaemon, DataFromTrainer
from p2pnode.training.trainer_link.engine_messages import EngineFromDaemon, EngineSaid
from p2pnode.training.trainer_link.interface import (
    BusyWith,
    Evaluation,
    ModelDescription,
    Ranges,
    Restored,
    Resume,
    StepOrder,
    StepReport,
    TensorSource,
    TrainerEnd,
    TrainerFailed,
    TrainerHello,
    TrainerLeft,
    Vector,
)
from p2pnode.training.trainer_link.record_messages import RecordsFromTrainer, RecordsGranted

#: Deltas are multiples of this.
UNIT = 1.0 / 1024.0

#: Virtual seconds of one step: a constant, or a function of (the trainer's own generator, the step's number).
StepTime = float | Callable[[random.Random, int], float]


def exponential(mean_s: float) -> StepTime:
    """Step times as the PSP literature draws them."""
    return lambda generator, _step: generator.expovariate(1.0 / mean_s)


def delta_of(name: str, step: int, size: int) -> Vector:
    """The delta of trainer `name` in `step`: float32 of shape (size,), multiples of `UNIT` from 1 to 28 of them."""
    amount = 1 + zlib.crc32(f"{name}/{step}".encode()) % 7
    return (amount * UNIT * (1 + np.arange(size) % 4)).astype(np.float32)


@lru_cache(maxsize=8)  # all nodes of a swarm begin with one
def initial_vector(seed: int, size: int) -> Vector:
    """What the trainer's model begins with: float32 of shape (size,), multiples of `UNIT` between -1 and 1. Not to be
    written to."""
    generator = random.Random(f"{seed}/initial")
    vector = np.array([generator.randrange(-1024, 1025) * UNIT for _ in range(size)], dtype=np.float32)
    vector.setflags(write=False)
    return vector


def plain_layout(size: int, buffers: int = 0) -> Layout:
    """One parameter, and one buffer of the last `buffers` values if there are any."""
    parameters = size - buffers
    entries = [LayoutEntry("weight", (parameters,), "float32", "parameter", 0, parameters)]
    if buffers:
        entries.append(LayoutEntry("running_mean", (buffers,), "float32", "buffer", parameters, buffers))
    return Layout(tuple(entries))


class StubTrainer:
    """Implements `training.trainer_link.interface.Trainer`. `trained` lists the steps whose delta was handed over."""

    def __init__(
        self,
        name: str,
        size: int = 256,
        *,
        seed: int = 0,
        step_s: StepTime = 1.0,
        start_s: float = 0.0,
        hang_s: float = 10.0,
        buffers: int = 0,
        layout: Layout | None = None,
        task: str = "stub",
        task_version: str = "1",
        evaluates: bool = True,
        on_state: Callable[[str], None] | None = None,
    ) -> None:
        self.name = name
        self.layout = layout or plain_layout(size, buffers)
        self.seed = seed
        self.task = task
        self.task_version = task_version
        self.evaluates = evaluates
        self.on_state = on_state
        self.vector: Vector = np.zeros(self.layout.total, np.float32)
        self.delta: Vector = np.zeros(self.layout.total, np.float32)
        self.trained: list[int] = []
        #: What it has trained and not handed over, and what its present step trains.
        self.progress: Vector = np.zeros(self.layout.total, np.float32)
        self.own: Vector = np.zeros(self.layout.total, np.float32)
        #: The steps whose work is in a delta, by the last of them, and those of a delta that was returned.
        self.parts: dict[int, tuple[int, ...]] = {}
        self._returned: list[int] = []
        #: Whether its last delta is being exchanged; steps since then; the steps whose values it was given.
        self.is_exchanging = False
        self._added_up: list[int] = []
        self.entered: list[int] = []
        #: A step ends no sooner than the exchange of the last delta: each has a delta of its own, to be counted.
        self.waits = True
        self._ended = asyncio.Event()
        self._ended.set()
        self.orders: list[StepOrder] = []
        self.starts = 0
        self.evaluations = 0
        self.saved: list[str] = []
        self.described = 0
        self.measured: list[Evaluation] = []
        self.restored: list[str] = []
        self.samples = 0
        #: Set: each value of a delta is drawn by this name and the step. Otherwise all deltas are parallel.
        self.batches = ""
        #: Set to make every `start` raise it.
        self.fail_start: TrainerFailed | None = None
        self._step_s = step_s
        self._start_s = start_s
        self._hang_s = hang_s
        self._random = random.Random(f"{seed}/{name}/trainer")
        self._state = "stopped"
        self._crashes = 0
        self._hanging: asyncio.Event | None = None
        #: Called with what a script would send about shared data; `granted` are the answers.
        self.send_to_daemon: Callable[[DataFromTrainer | RecordsFromTrainer], None] | None = None
        self.granted: list[DataFromDaemon | RecordsGranted | EngineFromDaemon] = []
        self.is_script = False
        self._leaves_after: int | None = None
        self._finishing_s = 0.0
        self._exit_code = 0
        self._end = TrainerEnd()
        self.busy: BusyWith | None = None
        self.findings: list[tuple[str, str]] = []
        #: What it was told at its end: the reason of `finish`, and "stop".
        self.told: list[str] = []

    @property
    def state(self) -> str:
        return self._state

    # -- faults

    def crash_next(self, times: int = 1) -> None:
        """The next `times` steps crash halfway, as if killed for lack of memory."""
        self._crashes += times

    def hang(self) -> None:
        """From now on no step ends until `resume`; after `hang_s` more seconds of silence the state is `hung`."""
        self._hanging = self._hanging or asyncio.Event()

    def resume(self) -> None:
        if self._hanging is not None:
            self._hanging.set()
            self._hanging = None

    def leave_after(self, step: int) -> None:
        """As a script that returns after this step."""
        self.is_script = True
        self._leaves_after = step

    def finish_in(self, seconds: float, exit_code: int = 0) -> None:
        """As a script that needs so long after the end of the run, and then ends with this code."""
        self.is_script = True
        self._finishing_s, self._exit_code = seconds, exit_code

    # -- the interface

    async def start(self, restore: str = "", *, resume: Resume | None = None) -> TrainerHello:
        self._set_state("starting")
        await asyncio.sleep(self._start_s)
        if self.fail_start is not None:
            self._set_state("crashed")
            raise self.fail_start
        hello = TrainerHello(
            layout=self.layout,
            task=self.task,
            task_version=self.task_version,
            frozen_digest="",
            device="stub",
            pid=0,
        )
        restored = Restored(has_vector=self.starts > 0, file=restore)
        if self.starts == 0 and resume is not None:
            restored = await resume(hello, self.vector)
        if restored.file:
            self.restored.append(restored.file)
        if not restored.has_vector:
            np.copyto(self.vector, initial_vector(self.seed, self.layout.total))
        self.starts += 1
        self.progress = np.zeros_like(self.vector)
        self.own = np.zeros_like(self.vector)
        self._added_up, self._returned, self.is_exchanging = [], [], False
        self._ended.set()
        self._set_state("running")
        return hello

    async def train(self, order: StepOrder) -> StepReport:
        self._need_running()
        if self._leaves_after is not None and order.step > self._leaves_after:
            self._set_state("left")
            raise TrainerLeft("the script has returned (stub)")
        self.orders.append(order)
        entered = len(self.entered)
        if not order.local_steps:
            return StepReport(order.step, 0.0, 0, 0, 0.0, {}, has_delta=self._cut())
        await self.load(order)
        seconds = self._step_s if isinstance(self._step_s, float | int) else self._step_s(self._random, order.step)
        if self._crashes:
            self._crashes -= 1
            await asyncio.sleep(seconds / 2)
            self._set_state("crashed")
            raise TrainerFailed(f"the trainer of {self.name} was killed (stub)")
        await asyncio.sleep(seconds)
        while (hanging := self._hanging) is not None:
            try:
                async with asyncio.timeout(self._hang_s):
                    await hanging.wait()
            except TimeoutError:
                self._set_state("hung")
                await hanging.wait()
        self._set_state("running")
        if self.waits:
            await self._ended.wait()
        if self.waits and len(self.entered) > entered:  # the node may have moved to the step of the others
            order = msgspec.structs.replace(order, step=self.entered[-1] + 1)
        await self.write_delta(order)
        self.progress += self.own
        self._added_up.append(order.step)
        samples = 32 * order.local_steps
        self.samples += samples
        return StepReport(
            step=order.step,
            loss=float(1.0 / order.step),
            samples=samples,
            optimizer_steps=order.local_steps,
            seconds=float(seconds),
            metrics={},
            has_delta=self._cut(),
        )

    def _cut(self) -> bool:
        """As a real trainer: the progress, unless the last delta is being exchanged."""
        if self.is_exchanging:
            return False
        self.delta[:] = self.progress
        self.trained += self._added_up
        self._returned += self._added_up
        self.parts[self._returned[-1]], self._added_up, self._returned = tuple(self._returned), [], []
        self.is_exchanging = True
        self._ended.clear()
        return True

    def encoded(self) -> None:
        self.progress -= self.delta

    async def arrived(
        self, step: int, keeps_base: Ranges = (), takes_back: Ranges = (), adds_delta: Ranges = ()
    ) -> None:
        for first, end in takes_back:
            self.progress[first:end] += self.delta[first:end]
        if takes_back and self.trained:
            self._returned = list(self.parts.pop(self.trained[-1], ()))
        self.is_exchanging = False
        self._ended.set()
        self.entered.append(step)

    async def load(self, order: StepOrder) -> None:
        """Nothing is loaded: the delta does not depend on it. Tests override this."""

    async def write_delta(self, order: StepOrder) -> None:
        """Write what a step trains into `own`. Tests override this."""
        if self.batches:
            draw = np.random.default_rng(zlib.crc32(f"{self.batches}/{order.step}".encode()))
            self.own[:] = draw.integers(-28, 29, self.layout.total) * UNIT
        else:
            np.copyto(self.own, delta_of(self.name, order.step, self.layout.total))

    async def evaluate(self, step: int) -> Evaluation | None:
        self._need_running()
        if not self.evaluates:
            return None
        self.evaluations += 1
        return Evaluation(step=step, metrics={"mean": float(self.vector.mean(dtype=np.float64))}, samples=100)

    async def save(self, path: str) -> Awaitable[None]:
        self._need_running()
        self.saved.append(path)
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        written.set_result(None)
        return written

    async def describe(self, folder: str, *, wait: bool = False) -> ModelDescription:
        """The vector's tensors, and one integer buffer that counts this node's own steps, as BatchNorm's does."""
        self._need_running()
        self.described += 1
        entries = self.layout.entries
        tensors = [TensorSource(entry.name, entry.dtype, entry.shape, "vector", entry.name) for entry in entries]
        tensors.append(TensorSource("counted", "int64", (), "local", "counted"))
        counted = (len(self.trained) + zlib.crc32(self.name.encode()) % 97).to_bytes(8, "little")
        return ModelDescription(self.layout.digest(), "", tuple(tensors), {"counted": counted})

    def take_measured(self) -> list[Evaluation]:
        """What tests put into `measured`."""
        measured, self.measured = self.measured, []
        return measured

    def on_data(self, handler: Callable[[DataFromTrainer | RecordsFromTrainer], None]) -> None:
        self.send_to_daemon = handler

    def send_data(self, message: DataFromDaemon | RecordsGranted | EngineFromDaemon) -> None:
        self.granted.append(message)

    def on_engine(self, handler: Callable[[EngineSaid], None]) -> None:
        """It uses no engine."""

    async def ended(self) -> TrainerFailed:
        """It ends when it is told to."""
        return await asyncio.get_running_loop().create_future()

    async def finish(self, reason: str, finish_s: float) -> TrainerEnd:
        return await self._finish(reason, finish_s)

    async def stop(self, stop_s: float = 0.0) -> TrainerEnd:
        return await self._finish("stop", stop_s)

    async def _finish(self, told: str, grace_s: float) -> TrainerEnd:
        if self._state in ("running", "hung", "finishing"):
            self.told.append(told)
            if self._finishing_s:
                self._set_state("finishing")
                await asyncio.sleep(min(self._finishing_s, grace_s))
            self._end = TrainerEnd(self._exit_code, cut_short=self._finishing_s > grace_s)
        self._set_state("stopped")
        return self._end

    # -- for tests

    def expected(self, steps: Sequence[int] | None = None) -> Vector:
        """The sum of the deltas of `steps` (default: all that were handed over), exact in float32."""
        total = np.zeros(self.layout.total, np.float32)
        for step in self.trained if steps is None else steps:
            total += delta_of(self.name, step, self.layout.total)
        return total

    def _need_running(self) -> None:
        if self._state not in ("running", "hung"):
            raise TrainerFailed(f"the trainer of {self.name} is {self._state}")

    def _set_state(self, state: str) -> None:
        if state != self._state:
            self._state = state
            if self.on_state is not None:
                self.on_state(state)
