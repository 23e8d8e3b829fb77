"""One cycle of the trainers of a node: it ends when each has reported, failed, or is hung while others are not."""

from __future__ import annotations

import asyncio

import pytest

from p2pnode.training.trainer_link.messages import StepAnswer
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.harness.trainers.stub_device import StubDevice, host_of
from tests.unit.training.devices.test_node_step import exchange, order


@run_by(run)
async def test_a_trainer_that_hangs_before_its_first_request_holds_nobody_up() -> None:
    """The cycle keeps a local step for it only as long as it is expected."""
    devices = [StubDevice(0), StubDevice(1)]
    host = host_of(devices, local_steps=2)
    await host.start()
    devices[1].hangs_early = True
    devices[1].hang()
    async with asyncio.timeout(60):
        report = await host.train(order(1, 2))
    assert report.optimizer_steps == 2


@run_by(run)
async def test_a_hung_trainer_holds_nobody_up_and_what_it_trained_counts_later() -> None:
    """The others go on without one that is hung; when it moves again its report counts in the next cycle."""
    devices = [StubDevice(0), StubDevice(1, rate=100.0)]
    host = host_of(devices, local_steps=2)
    await host.start()
    devices[1].hang()
    async with asyncio.timeout(60):
        await host.train(order(1, 2))
    assert host.delta[0] == pytest.approx(float(host.devices()[0].optimizer_steps))
    await exchange(host, 1)
    await host.train(order(2, 2))
    await exchange(host, 2)
    assert len(devices[1].orders) == 1, "it is still inside its first order"
    devices[1].resume()
    await asyncio.sleep(1.0)
    await host.train(order(3, 2))
    assert devices[1].answers[:2] == [StepAnswer.LOCAL, StepAnswer.DISTRIBUTED]
    # One late step of rate 100 beside two steps of each in this cycle, weighted by samples.
    assert host.delta[0] == pytest.approx((1 * 100.0 + 2 * 2.0 + 2 * 200.0) / 5)
    assert len(devices[1].orders) == 2


@run_by(run)
async def test_all_hung_means_that_the_node_is() -> None:
    """Where no trainer moves the node's is hung, as a single one, until one moves again."""
    devices = [StubDevice(0), StubDevice(1)]
    host, states = host_of(devices, local_steps=2), list[str]()
    host.on_state = states.append
    await host.start()
    for device in devices:
        device.hang()
    training = asyncio.create_task(host.train(order(1, 2)))
    await asyncio.sleep(50.0)
    assert (host.state, training.done()) == ("hung", False)
    for device in devices:
        device.resume()
    await training
    assert states == ["starting", "running", "hung", "running"]


@run_by(run)
async def test_a_cancelled_step_leaves_no_order_behind() -> None:
    """A node that leaves in the middle of a cycle abandons all orders; the next step starts a cycle of its own."""
    devices = [StubDevice(0), StubDevice(1)]
    host = host_of(devices, local_steps=4)
    await host.start()
    training = asyncio.create_task(host.train(order(1)))
    await asyncio.sleep(2.5)
    training.cancel()
    await asyncio.gather(training, return_exceptions=True)
    report = await host.train(order(1))
    assert report.optimizer_steps == 8
    assert host.delta[0] == 4.0
