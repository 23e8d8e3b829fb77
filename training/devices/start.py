"""Makes the trainer of a node: one process, or one for each of `training.device`.

Each of several asks for each step, and shares memory with the others.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.system import ThreadExecutor
from p2pnode.training.devices.gpus import count_gpus
from p2pnode.training.devices.host import HostParts, HostTrainer
from p2pnode.training.devices.names import resolved_devices, threads_each
from p2pnode.training.devices.node_step import DeviceGroups, backend_of
from p2pnode.training.settings import DevicesSettings, TrainingSettings
from p2pnode.training.supervisor.launch import NodeStart
from p2pnode.training.supervisor.process_trainer import ProcessTrainer
from p2pnode.training.supervisor.session import TrainerSession, checked_total
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.interface import MergeOrder, Trainer, Vector
from p2pnode.training.trainer_link.messages import StepAnswer, StepAnswered, StepWanted
from p2pnode.training.trainer_link.shared_memory import HostVectors, SharedVectors, TrainerMemory

#: Sockets and output of all trainers but the first, below the state directory.
FURTHER = "devices"
#: A merge is given up after this share of `training.hang_s`, before those that wait for a member count as hung too.
PATIENCE = 0.75
#: The beginning of the names of files by which groups of trainers meet, there.
GROUP = "group"


def make_trainer(
    training: TrainingSettings,
    devices: DevicesSettings,
    *,
    command: list[str] | None,
    node: NodeStart,
    state_dir: Path,
    environment: Environment,
    on_state: Callable[[str], None],
    on_output: Callable[[bytes], None] | None,
) -> Trainer:
    """The trainer of this node. `command` is the user's own, or None for the task class of the settings."""
    names = resolved_devices(training.device, count_gpus)
    log, clock = environment.log, environment.clock
    is_alone = len(names) == 1 and devices.coordination == "none"
    if is_alone:
        return ProcessTrainer(
            msgspec.structs.replace(training, device=names[0]),
            command=command,
            node=node,
            state_dir=state_dir,
            log=log,
            clock=clock,
            on_state=on_state,
            on_output=on_output,
        )
    leaders = 0 if devices.step == "average" else 1 if devices.coordination == "none" else 2
    memory = HostMemory(len(names), leaders=leaders)
    threads = threads_each(training.threads, len(names), os.cpu_count() or 1)
    trainers = []
    for index, name in enumerate(names):
        trainer = DeviceProcess(
            msgspec.structs.replace(training, device=name, threads=threads),
            command=command,
            node=node._replace(device=index, devices=len(names)),
            state_dir=state_dir / FURTHER / str(index) if index else state_dir,
            log=log,
            clock=clock,
            on_output=on_output,
        )
        trainer.share(memory, index)
        trainers.append(trainer)
    parts = HostParts(names, trainers, memory.leaders, _groups(training, devices, names, state_dir))
    host = HostTrainer(parts, devices, training, environment, on_state)
    for trainer in trainers:
        trainer.on_state = host.trainer_state_changed
    return host


def _groups(
    training: TrainingSettings, devices: DevicesSettings, names: list[str], state_dir: Path
) -> DeviceGroups | None:
    backend = backend_of(devices.merge, names)
    if backend is None or devices.step == "leader":
        return None
    folder = state_dir / FURTHER
    # Files of groups of an earlier process, whose numbers come again.
    for old in folder.glob(f"{GROUP}.*"):
        old.unlink(missing_ok=True)
    return DeviceGroups(backend, str((folder / GROUP).absolute()), max(1.0, PATIENCE * training.hang_s))


class HostMemory:
    """The memory of all trainers of a node, allocated when the first of them knows the size of its model."""

    def __init__(self, trainers: int, *, leaders: int) -> None:
        self._trainers = trainers
        self._leaders = leaders
        self._vectors: HostVectors | None = None
        self._one_at_a_time = asyncio.Lock()

    async def of(self, index: int, total: int) -> TrainerMemory:
        """The memory of one trainer. Raises `TrainerFailed`."""
        async with self._one_at_a_time:
            if self._vectors is None:
                checked_total(total)
                executor = ThreadExecutor(1)
                try:
                    self._vectors = await executor.run(
                        lambda: HostVectors(total, self._trainers, leaders=self._leaders)
                    )
                finally:
                    executor.close()
        return self._vectors.trainers[index]

    def leaders(self) -> list[Vector]:
        """The values of the leaders that there are: of the node's, and of the swarm's."""
        return [] if self._vectors is None else self._vectors.leaders


class DeviceProcess(ProcessTrainer):
    """Implements `training.devices.device.DeviceTrainer` with a process."""

    _on_step: Callable[[int], None] | None = None
    _host_memory: tuple[HostMemory, int]

    def share(self, memory: HostMemory, index: int) -> None:
        """Take the buffers of trainer number `index` from this memory, before the first start."""
        self._host_memory = memory, index

    def on_step(self, handler: Callable[[int], None]) -> None:
        """See `DeviceTrainer.on_step`."""
        self._on_step = handler

    def answer_step(self, number: int, answer: StepAnswer) -> None:
        """See `DeviceTrainer.answer_step`."""
        self._send(StepAnswered(self._turn, number, answer))

    async def merge(self, order: MergeOrder) -> bool:
        """See `DeviceTrainer.merge`."""
        answer = await self._ask(lambda turn: messages.Merge(turn, order), messages.Merged)
        return answer.is_done

    async def _allocate(self, total: int) -> SharedVectors | TrainerMemory:
        memory, index = self._host_memory
        return await memory.of(index, total)

    def _on_message(self, session: TrainerSession, message: messages.FromTrainer) -> None:
        super()._on_message(session, message)
        if session is not self._session or self._on_step is None:
            return
        if isinstance(message, StepWanted) and message.turn == self._turn:
            self._on_step(message.number)
