"""The host of several trainers, in virtual time: its start, failures and restarts, and its files."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from p2pnode.training.trainer_link.data_messages import Claim, DataGranted, DataOpened, DataShape, DataWanted
from p2pnode.training.trainer_link.interface import TrainerFailed, TrainerLeft
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.harness.trainers.stub_device import StubDevice, host_of
from tests.unit.training.devices.test_node_step import order


@run_by(run)
async def test_a_trainer_that_dies_is_dropped_and_restarted_beside_the_others() -> None:
    """The step ends without it and counts what the others trained; a moment later it takes part again."""
    devices = [StubDevice(0), StubDevice(1, rate=5.0), StubDevice(2)]
    host = host_of(devices, local_steps=4)
    await host.start()
    training = asyncio.create_task(host.train(order(1)))
    await asyncio.sleep(1.5)
    devices[1].die()
    report = await training

    # Each had begun two of its four steps. Two trainers make eight, and two of these are lost with the dead one.
    assert [one.optimizer_steps for one in host.devices()] == [3, 0, 3]
    assert report.optimizer_steps == 6
    assert host.delta[0] == 3.0
    assert host.state == "running"
    await asyncio.sleep(2.0)
    assert devices[1].starts == 2
    assert [one.failures for one in host.devices()] == [0, 1, 0]
    before = [len(device.orders) for device in devices]
    await host.train(order(2))
    assert [len(device.orders) - count for device, count in zip(devices, before, strict=True)] == [1, 1, 1]


@run_by(run)
async def test_only_when_all_trainers_have_failed_does_the_node_s_fail() -> None:
    """Killing all of them fails the step as the end of a single trainer does, and `start` brings all back."""
    devices = [StubDevice(0), StubDevice(1)]
    host = host_of(devices, local_steps=4)
    await host.start()
    training = asyncio.create_task(host.train(order(1)))
    await asyncio.sleep(1.5)
    for device in devices:
        device.die()
    with pytest.raises(TrainerFailed) as failed:
        await training
    assert not failed.value.fatal
    await host.start("state-file")
    assert [device.restored for device in devices] == [["state-file"], ["state-file.1"]]
    await host.train(order(1))
    assert host.delta[0] == 4.0


@run_by(run)
async def test_a_failure_that_would_come_again_gives_up_that_trainer_only() -> None:
    """A fatal failure of one leaves the others; of the last one it ends the run."""
    devices = [StubDevice(0), StubDevice(1)]
    host = host_of(devices, local_steps=4)
    await host.start()
    devices[1].fails_with = TrainerFailed("its memory is broken", fatal=True)
    await host.train(order(1))
    assert [one.state for one in host.devices()] == ["running", "failed"]
    await host.train(order(2))
    assert len(devices[1].orders) == 1
    devices[0].fails_with = TrainerFailed("so is this one's", fatal=True)
    with pytest.raises(TrainerFailed) as failed:
        await host.train(order(3))
    assert failed.value.fatal


@run_by(run)
async def test_a_trainer_that_always_fails_is_given_up() -> None:
    """Without a completed step it is restarted so often, later and later."""
    devices = [StubDevice(0), StubDevice(1)]
    host = host_of(devices, local_steps=1)
    await host.start()
    for step in range(1, 40):
        devices[1].fails_with = TrainerFailed("out of memory")
        await host.train(order(step, 1))
    assert [(one.state, one.failures) for one in host.devices()] == [("running", 0), ("failed", 5)]


@run_by(run)
async def test_data_of_a_trainer_that_cannot_be_started_again_goes_to_another() -> None:
    """What it had been granted and has not trained is granted to the next one that asks."""
    devices, passed = [StubDevice(0), StubDevice(1)], list[Any]()
    host = host_of(devices, local_steps=2)
    host.on_data(passed.append)
    await host.start()
    for device in devices:
        device.send_to_daemon(DataOpened(DataShape("samples", 60, 1), None))
    wanted = DataWanted(1, begins=True, finished=False, position=0, count=1, has_claims=False)
    devices[1].send_to_daemon(wanted)
    host.send_data(DataGranted(passed[-1].number, 0, [Claim(0, 7, 0)]))
    devices[1].fails_with = TrainerFailed("killed")
    devices[1].fail_start = TrainerFailed("its memory is broken", fatal=True)
    await host.train(order(1, 2))
    await asyncio.sleep(2.0)
    assert [one.state for one in host.devices()] == ["running", "failed"]

    devices[0].send_to_daemon(wanted)
    assert [claim.partition for claim in devices[0].granted[-1].claims] == [7]


@run_by(run)
async def test_a_trainer_that_is_killed_now_and_then_is_never_given_up() -> None:
    """Of processes that are ended from outside only those count that have completed no step."""
    devices = [StubDevice(0), StubDevice(1)]
    host = host_of(devices, local_steps=1)
    await host.start()
    for step in range(1, 9, 2):
        devices[1].fails_with = TrainerFailed("signal SIGKILL", cause="")
        await host.train(order(step, 1))
        await asyncio.sleep(5.0)
        await host.train(order(step + 1, 1))
    assert [(one.state, one.failures) for one in host.devices()] == [("running", 0), ("running", 4)]


@run_by(run)
async def test_the_node_leaves_when_the_scripts_of_all_trainers_have() -> None:
    """One script that returns is one trainer less; the last one ends the run."""
    devices = [StubDevice(0), StubDevice(1)]
    host = host_of(devices, local_steps=2)
    await host.start()
    devices[0].fails_with = TrainerLeft("returned")
    await host.train(order(1, 2))
    assert [one.state for one in host.devices()] == ["left", "running"]
    devices[1].fails_with = TrainerLeft("returned")
    with pytest.raises(TrainerLeft):
        await host.train(order(2, 2))


@run_by(run)
async def test_each_trainer_saves_a_file_of_its_own() -> None:
    """The first has the name it was given, the others that name with their number; a restart restores its own."""
    devices = [StubDevice(0), StubDevice(1)]
    host = host_of(devices, local_steps=2)
    await host.start()
    await (await host.save("/checkpoints/trainer.state"))
    assert [device.saved for device in devices] == [
        ["/checkpoints/trainer.state"],
        ["/checkpoints/trainer.state.1"],
    ]
    devices[1].fails_with = TrainerFailed("killed")
    await host.train(order(1, 2))
    await asyncio.sleep(1.0)
    assert devices[1].restored == ["/checkpoints/trainer.state.1"]
