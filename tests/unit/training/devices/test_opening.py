"""The first start of all trainers of a node: one vector, one model, and a failure that names its device."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from p2pnode.training.devices.opening import joint_hello, start_all
from p2pnode.training.layout import Layout, LayoutEntry
from p2pnode.training.trainer_link.engine_messages import EngineOpened
from p2pnode.training.trainer_link.interface import Restored, TrainerFailed, TrainerHello, TrainerLeft
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by


def hello(pid: int, layout: Layout | None = None, engine: EngineOpened | None = None) -> TrainerHello:
    return TrainerHello(
        layout or Layout(()), "digits", "1", "", f"stub:{pid}", evaluates=True, pid=pid, host_bytes=100, engine=engine
    )


class Trainer:
    """Starts after `start_s`; keeps what it was restored from."""

    def __init__(self, index: int, start_s: float = 0.0, failure: Exception | None = None) -> None:
        self.index, self.start_s, self.failure = index, start_s, failure
        self.restored: Restored | None = None
        self.is_cancelled = False

    async def start(self, *, resume: Any) -> TrainerHello:
        try:
            await asyncio.sleep(self.start_s)
            if self.failure is not None:
                raise self.failure
            self.restored = await resume(hello(self.index), np.zeros(1, np.float32))
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise
        return hello(self.index)


def devices(*trainers: Trainer) -> list[Any]:
    return [SimpleNamespace(index=one.index, name=f"stub:{one.index}", trainer=one, pid=None) for one in trainers]


@run_by(run, strict=True)
async def test_the_first_fills_the_vector_and_the_others_wait_for_it() -> None:
    """They are restored from the files that belong to the first's, in the order of the devices."""
    trainers = [Trainer(0, 5.0), Trainer(1), Trainer(2, 1.0)]

    async def resume(_hello: TrainerHello, _vector: Any) -> Restored:
        return Restored(has_vector=True, file="saved")

    hellos, file = await start_all(devices(*trainers), resume)
    assert ([one.pid for one in hellos], file) == ([0, 1, 2], "saved")
    assert [one.restored.file for one in trainers if one.restored is not None] == ["saved", "saved.1", "saved.2"]
    assert all(one.restored is not None and one.restored.has_vector for one in trainers)


@run_by(run, strict=True)
async def test_without_anything_to_resume_the_first_begins_with_its_own_values() -> None:
    """The others load these, and have no file."""
    trainers = [Trainer(0), Trainer(1)]
    _, file = await start_all(devices(*trainers), None)
    assert file == ""
    assert [one.restored for one in trainers] == [Restored(), Restored(has_vector=True, file="")]


@pytest.mark.parametrize("index", [0, 1])
@run_by(run, strict=True)
async def test_a_trainer_that_cannot_start_is_named_and_the_others_are_given_up(index: int) -> None:
    """Also where those wait for the first."""
    trainers = [Trainer(0, 5.0), Trainer(1, 5.0)]
    trainers[index].start_s, trainers[index].failure = 1.0, TrainerFailed("no memory", "less", fatal=True)
    with pytest.raises(TrainerFailed) as failed:
        await start_all(devices(*trainers), None)
    assert (failed.value.reason, failed.value.hint, failed.value.fatal) == (
        f"device stub:{index}: no memory",
        "less",
        True,
    )
    assert trainers[1 - index].is_cancelled


@run_by(run, strict=True)
async def test_a_script_that_has_left_is_no_failure_of_a_device() -> None:
    """Its reason stays as it is."""
    with pytest.raises(TrainerLeft, match="it has returned"):
        await start_all(devices(Trainer(0), Trainer(1, 0.0, TrainerLeft("it has returned"))), None)


def test_the_trainers_as_one() -> None:
    """All devices by name, the memory of all and of the node's own delta; each device knows its process."""
    layout = Layout((LayoutEntry("w", (3,), "float32", "parameter", 0, 3),))
    found = devices(Trainer(0), Trainer(1))
    joint = joint_hello(found, [hello(10, layout), hello(11, layout)])

    assert (joint.device, joint.pid, joint.host_bytes) == ("stub:10,stub:11", 10, 200 + 8 * 4 * 3)
    leader = joint_hello(found, [hello(10, layout), hello(11, layout)], positions=2)
    assert leader.host_bytes == joint.host_bytes + 2 * 4 * 3
    assert [one.pid for one in found] == [10, 11]
    with pytest.raises(TrainerFailed, match="stub:1 built another model than the one on stub:0"):
        joint_hello(found, [hello(10, layout), hello(11)])
    quantised = [
        msgspec.structs.replace(hello(pid, layout), frozen={"mask": "bool [2] 1", "codes": f"uint8 [2] {pid}"})
        for pid in (1, 2)
    ]
    with pytest.raises(TrainerFailed, match="the tensor codes, which is not exchanged, is another on stub:"):
        joint_hello(found, quantised)


def test_an_engine_wants_one_process() -> None:
    """Of several devices it is refused, for good."""
    with pytest.raises(TrainerFailed, match="engine of named values is one process") as failed:
        joint_hello(devices(Trainer(0), Trainer(1)), [hello(0, engine=EngineOpened("p2p", 1)), hello(1)])
    assert failed.value.fatal
