"""`HostTrainer`: several trainers of one node as one, for the step loop and everything else that knows one trainer.

A step of the swarm has `local_steps / period` cycles (`training.devices.node_step`). A trainer that fails is restarted
beside the others (`training.devices.device`); only when none is left does this one fail.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec
import numpy as np

from p2pnode.overlay.environment import Environment
from p2pnode.training.devices.coordination import Coordination
from p2pnode.training.devices.data_routes import DataRoutes
from p2pnode.training.devices.device import Device, DeviceTrainer
from p2pnode.training.devices.node_step import DeviceGroups, NodeStep
from p2pnode.training.devices.opening import device_file, joint_hello, start_all
from p2pnode.training.devices.positions import AveragePositions, LeaderPositions, NodeBase, Positions
from p2pnode.training.devices.turn import CycleRun
from p2pnode.training.failures import Failures
from p2pnode.training.settings import DevicesSettings, TrainingSettings
from p2pnode.training.trainer_link.engine_messages import EngineSaid
from p2pnode.training.trainer_link.interface import (
    BusyWith,
    Evaluation,
    ModelDescription,
    Ranges,
    Resume,
    StepOrder,
    StepReport,
    TrainerEnd,
    TrainerFailed,
    TrainerHello,
    TrainerLeft,
    Vector,
)


class HostTrainer:
    """Implements `training.trainer_link.interface.Trainer` with several of them, which share one `vector`.

    `names`: their devices. `leaders`: the memory of the leaders' values, once it is allocated. `groups`: how trainers
    merge by `torch.distributed`; None: in shared memory.
    """

    def __init__(
        self,
        names: Sequence[str],
        trainers: Sequence[DeviceTrainer],
        leaders: Callable[[], list[Vector]],
        groups: DeviceGroups | None,
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
        self._leaders = leaders
        self._groups = groups
        self._devices = [
            Device(index, name, trainer, environment, Failures(), self._restart, self._gone)
            for index, (name, trainer) in enumerate(zip(names, trainers, strict=True))
        ]
        self.cycles = CycleRun(settings.period or training.local_steps, self._failed)
        self._routes = DataRoutes([device.trainer.send_data for device in self._devices])
        self._step: NodeStep | None = None
        self._base: NodeBase | None = None
        #: The node trains a step, or moves to other values.
        self._at_work = asyncio.Lock()
        #: This node's part in what the nodes decide together; None where each decides for itself.
        self.coordination: Coordination | None = None
        self._hello: TrainerHello | None = None
        self._state = "stopped"
        self._is_starting = False
        self._restore = ""
        self.on_data, self.send_data = self._routes.on_data, self._routes.to_trainers
        for device in self._devices:
            device.trainer.on_state = self.trainer_state_changed
            device.trainer.on_step(partial(self.cycles.requested, device))
            device.trainer.on_data(partial(self._routes.from_trainer, device.index))

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

    @property
    def findings(self) -> list[tuple[str, str]]:
        """What the trainers have found wrong, each with what to do."""
        return list(dict.fromkeys(found for device in self._devices for found in device.trainer.findings))

    def devices(self) -> list[Device]:
        """Every trainer, for `/status`."""
        leader = None if self._step is None else self._step.positions.leader
        for device in self._devices:
            device.leads = device.index == leader
        return self._devices

    def trainer_state_changed(self, _: str = "") -> None:
        """Callback of each trainer's supervisor."""
        self.cycles.notice()
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
        """See `Trainer.start`. Of the first start every trainer is needed. A device that this machine has not, or a
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
        self._hello = hello = joint_hello(
            self._devices, hellos, positions=len(hellos) if self._settings.step == "leader" else 0
        )
        shared, settings, total = self._devices[0].trainer.vector, self._settings, hello.layout.total
        self.vector = shared.copy()
        self.delta = np.zeros_like(shared)
        self._base = NodeBase(self.vector, self.delta, shared)
        self._step = NodeStep(
            self._devices,
            self.cycles,
            self._groups,
            AveragePositions(total)
            if settings.step == "average"
            else LeaderPositions(total, self._leaders(), settings.pull, settings.pull),
            shared,
            settings,
            self._environment,
            self._failed,
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
        if self._step is not None:
            self._step.forget(index)
        self.cycles.notice()

    def _failed(self, device: Device, failure: TrainerFailed) -> None:
        device.note_failure(failure)
        self.trainer_state_changed()

    def _gone(self, index: int) -> None:
        self._routes.gone(index)
        self.trainer_state_changed()

    async def finish(self, reason: str, finish_s: float) -> TrainerEnd:
        """See `Trainer.finish`."""
        return await self._end(lambda device: device.trainer.finish(reason, finish_s))

    async def stop(self, stop_s: float = 0.0) -> TrainerEnd:
        """See `Trainer.stop`."""
        return await self._end(lambda device: device.trainer.stop(stop_s))

    async def _end(self, end: Callable[[Device], Awaitable[TrainerEnd]]) -> TrainerEnd:
        """End all at once; the exit code is that of the first which has one. A script gets the last values."""
        if self._base is not None:
            await self._environment.executor.run(self._base.enter, 0, (), ())
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

    async def train(self, order: StepOrder) -> StepReport:
        """See `Trainer.train`. Values enter between two steps of the node."""
        assert self._step is not None
        assert self._base is not None
        base, run = self._base, self._environment.executor.run
        order = msgspec.structs.replace(order, known_step=base.known_step)
        report = StepReport(order.step, math.nan, 0, 0, 0.0, {})
        async with self._at_work:
            if order.local_steps:
                carried = await run(base.carried)
                report = await self._step.train(order, carried, base.way, self._first.index)
                await run(base.add_way)
            has_delta = not base.is_exchanging
            is_finite = await run(base.cut) if has_delta else True
            report = msgspec.structs.replace(report, is_finite=is_finite, has_delta=has_delta)
        if self.coordination is not None:
            self.coordination.step_trained()
        return report

    def encoded(self) -> None:
        """See `Trainer.encoded`."""
        assert self._base is not None
        self._base.is_encoded = True

    async def arrived(
        self, step: int, keeps_base: Ranges = (), takes_back: Ranges = (), adds_delta: Ranges = ()
    ) -> None:
        """See `Trainer.arrived`."""
        assert self._base is not None
        async with self._at_work:
            await self._environment.executor.run(self._base.enter, step, keeps_base, takes_back, adds_delta)

    # -- together with other nodes -------------------------------------------------------------------------------

    def coordinate(self, coordination: Coordination) -> None:
        """From the next cycle on local steps are leased, and the trainers follow the leader of the swarm."""
        self.coordination = coordination
        self.cycles.lease_from(coordination.want)

    @property
    def positions(self) -> Positions:
        """Where the trainers stand; once they are started."""
        assert self._step is not None
        return self._step.positions

    # -- one for all ---------------------------------------------------------------------------------------------

    async def evaluate(self, step: int) -> Evaluation | None:
        """See `Trainer.evaluate`: one trainer evaluates for all, with values that do not change meanwhile."""
        async with self._at_work:
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

    def on_engine(self, handler: Callable[[EngineSaid], None]) -> None:
        """See `Trainer.on_engine`: a node with several trainers runs no engine."""
