"""`HostTrainer`: several trainers of one node as one, for the step loop and everything else that knows one trainer.

A step of the swarm has `local_steps / period` cycles (`training.devices.turn`). After each the distributed step is made
in shared memory (`training.devices.positions`), and the last one gives the node's delta. A trainer that fails is
restarted beside the others (`training.devices.device`); only when none is left does this one fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from overlay.environment import Environment
from training.devices.arithmetic import combined, is_finite
from training.devices.data_routes import DataRoutes
from training.devices.device import Device, DeviceFacts, DeviceTrainer
from training.devices.opening import device_file, joint_hello, start_all
from training.devices.positions import AveragePositions, LeaderPositions
from training.devices.turn import CycleRun, DeviceOrder
from training.settings import DevicesSettings, TrainingSettings
from training.trainer_link.data_messages import DataFromDaemon, DataFromTrainer
from training.trainer_link.engine_messages import EngineFromDaemon, EngineSaid
from training.trainer_link.handshake import BufferHandshake
from training.trainer_link.interface import (
    BusyWith,
    Evaluation,
    ModelDescription,
    Resume,
    StepOrder,
    StepReport,
    TrainerEnd,
    TrainerFailed,
    TrainerHello,
    TrainerLeft,
    Vector,
)
from training.trainer_link.record_messages import RecordsFromDaemon, RecordsFromTrainer

#: A trainer whose deltas are not finite so many times in a row is started again from its last saved state.
NOT_FINITE_CYCLES = 3


class HostParts(NamedTuple):
    """The trainers of a node, and the names of their devices. `leaders`: the memory of the leaders' values."""

    names: Sequence[str]
    trainers: Sequence[DeviceTrainer]
    leaders: Callable[[], list[Vector]] = list


class HostTrainer:
    """Implements `training.trainer_link.interface.Trainer` with several of them, which share one `vector`."""

    def __init__(
        self,
        parts: HostParts,
        settings: DevicesSettings,
        training: TrainingSettings,
        environment: Environment,
        on_state: Callable[[str], None] | None = None,
    ) -> None:
        self.vector: Vector = np.zeros(0, np.float32)
        self.delta: Vector = np.zeros(0, np.float32)
        self.on_state = on_state
        self._settings = settings
        self._environment = environment
        self._log = environment.log
        self._clock = environment.clock
        self._leaders = parts.leaders
        self._devices = [
            Device(index, name, trainer, environment, training.max_restarts, self._restart)
            for index, (name, trainer) in enumerate(zip(parts.names, parts.trainers, strict=True))
        ]
        self._period = settings.period or training.local_steps
        self._cycles = CycleRun(self._period, self._failed)
        self._routes = DataRoutes([device.trainer.send_data for device in self._devices])
        self._positions: AveragePositions | LeaderPositions | None = None
        self._hello: TrainerHello | None = None
        self._state = "stopped"
        self._is_starting = False
        self._restore = ""
        #: Deltas in a row that were not finite, by device.
        self._not_finite: dict[int, int] = {}
        for device in self._devices:
            device.trainer.on_step(partial(self._cycles.requested, device))
            device.trainer.on_data(partial(self._routes.from_trainer, device.index))
            device.trainer.on_engine(_refuse_engine)

    # -- what it is ----------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """That of the trainers together: `hung` where all that live are hung, `crashed` where none lives."""
        return self._state

    @property
    def is_script(self) -> bool:
        return self._devices[0].trainer.is_script

    @property
    def busy(self) -> BusyWith | None:
        """What the first trainer that says so is busy with."""
        return next((found for device in self._devices if (found := device.trainer.busy) is not None), None)

    def devices(self) -> list[DeviceFacts]:
        """Every trainer, for `/status`."""
        leader = None if self._positions is None else self._positions.leader
        return [device.facts(leads=device.index == leader) for device in self._devices]

    def trainer_state_changed(self, _: str = "") -> None:
        """Callback of each trainer's supervisor."""
        self._cycles.notice()
        if not self._is_starting:
            self._set_state(self._joint_state())

    def _joint_state(self) -> str:
        states = [device.state for device in self._devices if device.gone is None]
        if not states:
            return "left" if all(isinstance(device.gone, TrainerLeft) for device in self._devices) else "crashed"
        for state in ("running", "hung", "starting", "finishing", "left", "crashed"):
            if state in states:
                return state
        return "stopped"

    def _set_state(self, state: str) -> None:
        if state != self._state:
            self._state = state
            if self.on_state is not None:
                self.on_state(state)

    @property
    def _first(self) -> Device:
        """The trainer that evaluates, and describes the model."""
        living = [device for device in self._devices if device.trainer.state in ("running", "hung", "finishing")]
        return next((device for device in living if device.is_free), next(iter(living), self._devices[0]))

    # -- life cycle ----------------------------------------------------------------------------------------------

    async def start(self, restore: str = "", *, resume: Resume | None = None) -> TrainerHello:
        """See `Trainer.start`. Of the first start every trainer is needed: a device that this machine has not, or a
        model that differs, is an error of the settings."""
        for device in self._devices:
            await device.cancel()
        self._restore = restore
        self._is_starting = True
        self._set_state("starting")
        try:
            hello = await (self._start_first(resume) if self._hello is None else self._start_again())
        except TrainerFailed:
            self._is_starting = False
            self._set_state("crashed")
            raise
        finally:
            self._is_starting = False
        self._set_state(self._joint_state())
        return hello

    async def _start_first(self, resume: Resume | None) -> TrainerHello:
        hellos, self._restore = await start_all(self._devices, resume)
        self._hello = hello = joint_hello(self._devices, hellos)
        self.vector = self._devices[0].trainer.vector
        self.delta = np.zeros_like(self.vector)
        settings, total = self._settings, hello.layout.total
        self._positions = (
            AveragePositions(total)
            if settings.step == "average"
            else LeaderPositions(total, self._leaders(), settings.c1)
        )
        return hello

    async def _start_again(self) -> TrainerHello:
        """After all have failed: one that starts is enough, the others are restarted beside it."""
        assert self._hello is not None
        again = [device for device in self._devices if device.gone is None]
        results = await asyncio.gather(*(self._restart(device.index) for device in again), return_exceptions=True)
        failures = []
        for device, result in zip(again, results, strict=True):
            if isinstance(result, TrainerFailed):
                failures.append(result)
                device.note_failure(result)
            elif isinstance(result, BaseException):
                raise result
        if len(failures) == len(again):
            raise failures[0] if failures else TrainerFailed("no device is left to train on", fatal=True)
        return self._hello

    async def _restart(self, index: int) -> None:
        device = self._devices[index]
        hello = await device.trainer.start(device_file(self._restore, index))
        device.pid = hello.pid
        self._not_finite.pop(index, None)
        if self._positions is not None:
            self._positions.forget(index)
        self._cycles.notice()

    def _failed(self, device: Device, failure: TrainerFailed) -> None:
        device.note_failure(failure)
        if device.gone is not None:
            self._routes.gone(device.index)
        self.trainer_state_changed()

    async def finish(self, reason: str, finish_s: float) -> TrainerEnd:
        """See `Trainer.finish`."""
        return await self._end(lambda device: device.trainer.finish(reason, finish_s))

    async def stop(self, stop_s: float = 0.0) -> TrainerEnd:
        """See `Trainer.stop`."""
        return await self._end(lambda device: device.trainer.stop(stop_s))

    async def _end(self, end: Callable[[Device], Awaitable[TrainerEnd]]) -> TrainerEnd:
        """End all at once; the exit code is that of the first which has one."""
        for device in self._devices:
            await device.cancel()
        self._is_starting = True
        if self.is_script and self._state in ("running", "hung", "left"):
            self._set_state("finishing")
        ends = await asyncio.gather(*(end(device) for device in self._devices))
        self._set_state("stopped")
        code = next((one.exit_code for one in ends if one.exit_code), 0)
        return TrainerEnd(code, cut_short=any(one.cut_short for one in ends))

    async def ended(self) -> TrainerFailed:
        """See `Trainer.ended`; only engines ask for it, and they have one trainer."""
        return await self._devices[0].trainer.ended()

    # -- training ------------------------------------------------------------------------------------------------

    async def train(self, order: StepOrder, handshake: BufferHandshake | None = None) -> StepReport:
        """See `Trainer.train`."""
        assert self._positions is not None
        began_s = self._clock.monotonic()
        run = self._environment.executor.run
        positions = self._positions
        await run(self._begin_step, order.carry)
        cycles = max(1, order.local_steps // self._period)
        reports: list[StepReport] = []
        try:
            for cycle in range(cycles):
                is_last = cycle + 1 == cycles
                reports += await self._cycle(order, cycle, handshake if is_last else None, with_start=cycle > 0)
        except BaseException:
            await asyncio.gather(*(device.cancel() for device in self._devices))
            raise
        finally:
            if handshake is not None:
                handshake.loaded.set()
        if handshake is not None:
            await handshake.delta_taken.wait()
        await run(positions.delta, self.delta)
        return combined(order.step, reports, self._clock.monotonic() - began_s)

    def _begin_step(self, carry: float) -> None:
        assert self._positions is not None
        carried = np.float32(carry) * self.delta if carry else None
        if carried is not None and not is_finite(carried):
            carried = None  # no owner adds it
        self._positions.begin(carried, self.vector)

    async def _cycle(
        self, order: StepOrder, cycle: int, handshake: BufferHandshake | None, *, with_start: bool
    ) -> list[StepReport]:
        positions, run = self._positions, self._environment.executor.run
        assert positions is not None
        late = self._late_reports()
        for index, report in late.items():
            await run(positions.late, index, report, self._devices[index].trainer.delta)
        free = {device.index: device for device in self._devices if device.is_free}
        if not free:
            raise self._no_device()
        starts_elsewhere = with_start or bool(order.carry) or isinstance(positions, LeaderPositions)
        orders: dict[int, DeviceOrder] = {}
        loaded: list[BufferHandshake] = []
        for index, device in free.items():
            own: BufferHandshake | None = None
            if starts_elsewhere:
                await run(np.copyto, device.trainer.delta, positions.start(index))
                own = BufferHandshake()
                own.delta_taken.set()
                loaded.append(own)
            orders[index] = DeviceOrder(self._order_for(order, index, cycle, carries=starts_elsewhere), own)
        telling = asyncio.create_task(_tell_loaded(loaded, handshake)) if handshake is not None and loaded else None
        try:
            reports = await self._cycles.run(orders, free)
        finally:
            if telling is not None:
                telling.cancel()
        finite = {index: report for index, report in reports.items() if await self._is_finite(index)}
        if not finite:
            if not reports:
                raise self._no_device()
            finite = reports  # The owners refuse it, and the step loop says so.
        deltas = {index: self._devices[index].trainer.delta for index in finite}
        await run(positions.combine, finite, deltas)
        return [*finite.values(), *late.values()]

    def _order_for(self, order: StepOrder, index: int, cycle: int, *, carries: bool) -> StepOrder:
        settings, count = self._settings, len(self._devices)
        local_pull = 0.0
        positions = self._positions
        if isinstance(positions, LeaderPositions):
            local_pull = settings.p1 / self._period if positions.has_local else 0.0
        return StepOrder(
            step=order.step,
            local_steps=order.local_steps,
            workers=order.workers * count,
            is_first=order.is_first and index == self._first.index,
            node_index=order.node_index * count + index,
            carry=1.0 if carries else 0.0,
            asks=True,
            done=cycle * self._period,
            local_pull=local_pull,
            loss_window=settings.avg_size if isinstance(positions, LeaderPositions) else 0,
        )

    def _late_reports(self) -> dict[int, StepReport]:
        """What trainers that were hung have come to since: it counts now, and they are free again."""
        found: dict[int, StepReport] = {}
        for device in self._devices:
            if device.task is not None and device.task.done():
                try:  # only those that were hung have an order here
                    found[device.index] = device.take_report()
                except TrainerFailed as failure:
                    self._failed(device, failure)
        return found

    async def _is_finite(self, index: int) -> bool:
        """Whether a trainer's delta may count; one that never may starts again from its last saved state."""
        device = self._devices[index]
        if await self._environment.executor.run(is_finite, device.trainer.delta):
            self._not_finite.pop(index, None)
            return True
        self._not_finite[index] = count = self._not_finite.get(index, 0) + 1
        self._log.warning("device_not_finite", device=device.name, index=index, in_a_row=count)
        if count >= NOT_FINITE_CYCLES and device.is_free:
            del self._not_finite[index]
            reason = f"its deltas of {count} cycles in a row have values that are not finite"
            self._failed(device, TrainerFailed(reason, "lower the learning rate or clip the gradients"))
        return False

    def _no_device(self) -> TrainerFailed:
        """Why nothing can be trained: all have left, or failed."""
        gone = [device.gone for device in self._devices if device.gone is not None]
        if len(gone) == len(self._devices):
            return next((one for one in gone if not isinstance(one, TrainerLeft)), gone[0])
        return TrainerFailed("the trainers of all devices have failed", "see device_dropped in the log")

    # -- one for all ---------------------------------------------------------------------------------------------

    async def evaluate(self, step: int) -> Evaluation | None:
        """See `Trainer.evaluate`: one trainer evaluates for all, because it loads the shared vector."""
        return await self._first.trainer.evaluate(step)

    async def save(self, path: str) -> Awaitable[None]:
        """See `Trainer.save`: each trainer has a file of its own, that of the first has the given name."""
        ready = [device for device in self._devices if device.is_free]
        written = await asyncio.gather(
            *(device.trainer.save(device_file(path, device.index)) for device in ready), return_exceptions=True
        )
        files: list[Awaitable[None]] = []
        for device, one in zip(ready, written, strict=True):
            if isinstance(one, BaseException):
                if not isinstance(one, TrainerFailed) or len(ready) == 1 or device.index == 0:
                    raise one
                self._log.warning("device_state_not_saved", device=device.name, index=device.index, reason=str(one))
            else:
                files.append(one)
        return self._all_written(files, path)

    async def _all_written(self, files: list[Awaitable[None]], path: str) -> None:
        await asyncio.gather(*files)
        self._restore = path

    async def describe(self, folder: str, *, wait: bool = False) -> ModelDescription:
        """See `Trainer.describe`."""
        return await self._first.trainer.describe(folder, wait=wait)

    def take_measured(self) -> list[Evaluation]:
        """See `Trainer.take_measured`."""
        return [found for device in self._devices for found in device.trainer.take_measured()]

    def on_data(self, handler: Callable[[DataFromTrainer | RecordsFromTrainer], None]) -> None:
        """See `Trainer.on_data`."""
        self._routes.on_data(handler)

    def send_data(self, message: DataFromDaemon | RecordsFromDaemon | EngineFromDaemon) -> None:
        """See `Trainer.send_data`."""
        self._routes.to_trainers(message)

    def on_engine(self, handler: Callable[[EngineSaid], None]) -> None:
        """See `Trainer.on_engine`: a node with several trainers runs no engine."""


def _refuse_engine(_: EngineSaid) -> None:
    """No engine runs here."""


async def _tell_loaded(devices: Sequence[BufferHandshake], host: BufferHandshake) -> None:
    """The shared vector may change as soon as every trainer has loaded it."""
    for one in devices:
        await one.loaded.wait()
    host.loaded.set()
