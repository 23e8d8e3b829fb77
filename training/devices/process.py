"""A trainer process that is one of several of its node: it asks for each step, and shares memory with the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2pnode.overlay.system import ThreadExecutor
from p2pnode.training.supervisor.process_trainer import ProcessTrainer
from p2pnode.training.supervisor.session import TrainerSession, checked_total
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.interface import MergeOrder, Vector
from p2pnode.training.trainer_link.shared_memory import HostVectors, SharedVectors, TrainerMemory
from p2pnode.training.trainer_link.step_messages import StepAnswer, StepAnswered, StepWanted


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
    _host_memory: tuple[HostMemory, int] | None = None

    def share(self, memory: HostMemory, index: int) -> None:
        """Take the buffers of trainer number `index` from this memory."""
        self._host_memory = memory, index

    def watch_state(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with every new state."""
        self.on_state = callback

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
        if self._host_memory is None:
            return await super()._allocate(total)
        memory, index = self._host_memory
        return await memory.of(index, total)

    def _on_message(self, session: TrainerSession, message: messages.FromTrainer) -> None:
        super()._on_message(session, message)
        if session is not self._session or self._on_step is None:
            return
        if isinstance(message, StepWanted) and message.turn == self._turn:
            self._on_step(message.number)
