"""One of several trainers of a node: its requests for steps, and the memory that all share."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pnode.training.devices import start as module
from p2pnode.training.devices.start import DeviceProcess, HostMemory
from p2pnode.training.settings import TrainingSettings
from p2pnode.training.supervisor.launch import NodeStart
from p2pnode.training.trainer_link import messages
from p2pnode.training.trainer_link.interface import TrainerFailed
from p2pnode.training.trainer_link.messages import StepAnswer, StepAnswered, StepWanted
from p2pnode.training.trainer_link.shared_memory import HostVectors
from tests.harness.environment.simulated import ListLog, VirtualClock
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by


class Session:
    """Keeps what a process is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


def process(session: Session | None = None) -> Any:
    clock = VirtualClock()
    made: Any = DeviceProcess(
        TrainingSettings(),
        command=None,
        node=NodeStart(b"n" * 20, 1),
        state_dir=Path("/nowhere"),
        log=ListLog([], "", clock),
        clock=clock,
    )
    made._session = session
    made._state = "running"
    return made


@run_by(run)
async def test_requests_for_steps_reach_the_host_in_their_turn_alone() -> None:
    """One of an earlier turn is late, and one of an earlier process is nobody's; the answer goes to the present one."""
    session = Session()
    trainer, wanted = process(session), []
    trainer._turn = 5
    trainer._on_message(session, StepWanted(5, 1))
    trainer.on_step(wanted.append)
    trainer._on_message(session, StepWanted(5, 2))
    trainer._on_message(session, StepWanted(4, 3))
    trainer._on_message(Session(), StepWanted(5, 4))
    trainer._on_message(session, messages.Idle())
    assert wanted == [2]
    trainer.answer_step(2, StepAnswer.DISTRIBUTED)
    assert session.sent == [StepAnswered(5, 2, StepAnswer.DISTRIBUTED)]
    trainer._session = None
    trainer.answer_step(3, StepAnswer.STOP)


@run_by(asyncio.run)
async def test_the_memory_of_all_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ask for it at the same time: one vector, a delta for each, and the leaders' values."""
    made: list[int] = []

    def counted(total: int, trainers: int, **given: Any) -> HostVectors:
        made.append(total)
        return HostVectors(total, trainers, **given)

    monkeypatch.setattr(module, "HostVectors", counted)
    memory = HostMemory(3, leaders=2)
    assert memory.leaders() == []
    trainers = [process() for _ in range(3)]
    for index, trainer in enumerate(trainers):
        trainer.share(memory, index)
    found = await asyncio.gather(*(trainer._allocate(8) for trainer in trainers))
    assert made == [8]
    found[0].vector[3] = 5.0
    found[1].delta[:] = 7.0
    assert [one.vector[3] for one in found] == [5.0] * 3
    assert [one.delta[0] for one in found] == [0.0, 7.0, 0.0]
    assert [one.size for one in memory.leaders()] == [8, 8]
    # The descriptors: the vector, the own delta, the leaders.
    assert [len(one.descriptors) for one in found] == [4] * 3
    assert len({one.descriptors[1] for one in found}) == 3
    assert len({(one.descriptors[0], *one.descriptors[2:]) for one in found}) == 1


@run_by(asyncio.run)
async def test_memory_that_could_not_be_made_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without values, or too little memory, is the failure of that start alone."""
    memory = HostMemory(2, leaders=0)
    with pytest.raises(TrainerFailed, match="no trainable parameter"):
        await memory.of(0, 0)

    def too_little(*_: Any, **__: Any) -> Any:
        raise TrainerFailed("too little memory")

    with monkeypatch.context() as patch:
        patch.setattr(module, "HostVectors", too_little)
        with pytest.raises(TrainerFailed, match="too little"):
            await memory.of(0, 8)
    found = await memory.of(1, 8)
    assert found.delta.dtype == np.float32
