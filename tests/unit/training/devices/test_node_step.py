"""One step of the swarm on several trainers of a node: its cycles, the distributed step after each, and the delta."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from p2pnode.training.devices.host import HostTrainer
from p2pnode.training.devices.node_step import DeviceGroups, backend_of
from p2pnode.training.trainer_link.interface import StepOrder
from p2pnode.training.trainer_link.messages import StepAnswer
from tests.harness.environment.simulated import ListLog
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.harness.trainers.stub_device import SIZE, StubDevice, host_of


def order(step: int, local_steps: int = 4) -> StepOrder:
    return StepOrder(step, local_steps, workers=2.0, is_first=True, node_index=1)


async def exchange(host: HostTrainer, step: int, share: float = 1.0) -> None:
    """The owners add a share of the node's delta, and the value enters."""
    host.vector += np.float32(share) * host.delta
    host.encoded()
    await host.arrived(step)


@run_by(run)
async def test_the_delta_is_the_mean_of_the_trainers_weighted_by_samples() -> None:
    """A trainer at four times the speed trains more steps of the cycle, and counts as much more."""
    devices = [StubDevice(0, rate=1.0), StubDevice(1, rate=4.0, pace_s=0.25)]
    host = host_of(devices, local_steps=10)
    await host.start()
    report = await host.train(order(1, 10))
    steps = [one.optimizer_steps for one in host.devices()]

    assert sum(steps) == report.optimizer_steps == 20
    assert steps[1] > 3 * steps[0]
    expected = (steps[0] * steps[0] * 1.0 + steps[1] * steps[1] * 4.0) / 20
    assert host.delta == pytest.approx(np.full(SIZE, expected))
    assert report.samples == 160


@run_by(run)
async def test_trainers_of_one_node_know_their_places_among_all() -> None:
    """With two trainers per node, node 1 of 2 has the workers 2 and 3 of 4, and one of them is the first."""
    devices = [StubDevice(0), StubDevice(1)]
    host = host_of(devices, local_steps=4)
    await host.start()
    await host.train(order(1))
    got = [device.orders[0] for device in devices]

    assert [(one.node_index, one.workers, one.is_first) for one in got] == [(2, 4.0, True), (3, 4.0, False)]
    assert all(one.asks and one.local_steps == 4 for one in got)


@run_by(run)
async def test_between_cycles_all_go_on_from_their_mean() -> None:
    """With a period of 1 each trainer begins every cycle where the mean of the one before is, and the delta of the node
    is the whole way."""
    devices = [StubDevice(0, rate=1.0), StubDevice(1, rate=3.0)]
    host = host_of(devices, period=1, local_steps=3)
    await host.start()
    base = host.vector[0]
    await host.train(order(1, 3))

    for device in devices:
        assert [began - base for began in device.began] == pytest.approx([0.0, 2.0, 4.0])
        assert [one.done for one in device.orders] == [0, 1, 2]
        assert device.answers == [StepAnswer.LOCAL, StepAnswer.DISTRIBUTED] * 3
    assert host.delta == pytest.approx(np.full(SIZE, 6.0))


@run_by(run)
async def test_deltas_that_are_not_finite_do_not_count() -> None:
    """One trainer that diverges is left out of the mean, and after three cycles starts again from its saved state."""
    devices = [StubDevice(0), StubDevice(1, rate=float("nan"))]
    host = host_of(devices, local_steps=2)
    await host.start()
    for step in range(1, 4):
        await host.train(order(step, 2))
        assert host.delta[0] == 2.0
    await asyncio.sleep(1.0)
    assert devices[1].starts == 2


@run_by(run)
async def test_trainers_that_merge_by_themselves_go_on_from_their_mean() -> None:
    """The one that writes has the mean of all, weighted by samples; in a step nobody loads it, and a new step begins at
    the vector. One that was restarted loads."""
    devices = [StubDevice(0, rate=1.0), StubDevice(1, rate=3.0)]
    host = host_of(devices, groups=DeviceGroups("gloo", "/group", 1.0), period=1, local_steps=2)
    for device in devices:
        device.fellows = devices
    await host.start()
    report = await host.train(order(1, 2))
    assert host.delta == pytest.approx(np.full(SIZE, 4.0))
    assert (report.samples, report.optimizer_steps) == (32, 4)
    for device in devices:
        assert [(one.keeps_delta, one.continues, one.at_delta) for one in device.orders] == [
            (True, False, False),
            (True, True, False),
        ]
    await exchange(host, 1)
    await host.train(order(2, 2))
    assert [(one.continues, one.at_delta) for one in devices[0].orders[2:]] == [(False, False), (True, False)]


@run_by(run)
async def test_nobody_is_pulled_before_there_is_a_leader() -> None:
    """The memory of the leader's values holds none until a trainer with a running loss has led."""
    devices = [StubDevice(0), StubDevice(1)]
    host = host_of(devices, step="leader", pull=0.5, local_steps=2)
    await host.start()
    for step in range(1, 5):
        await host.train(order(step, 2))
        await exchange(host, step)
        devices[1].recent_loss = 1.0

    assert [[one.local_pull for one in device.orders] for device in devices] == [[0.0, 0.0, 0.25, 0.25]] * 2


@run_by(run)
async def test_a_merge_that_fails_is_made_in_shared_memory() -> None:
    """Each writes its own delta then, so nothing that was trained is lost, and the next merge has a new group."""
    log = ListLog([], "host", None)
    devices = [StubDevice(0, rate=1.0), StubDevice(1, rate=3.0)]
    host = host_of(devices, log, DeviceGroups("gloo", "/group", 1.0), local_steps=2)
    await host.start()
    await host.train(order(1, 2))
    assert host.delta == pytest.approx(np.full(SIZE, 4.0))
    assert [one.members for one in devices[1].merges] == [(0, 1), (1,)]
    for device in devices:
        device.fellows = devices
    await host.train(order(2, 2))
    assert [device.merges[-1].group for device in devices] == [2, 2]
    assert host.delta == pytest.approx(np.full(SIZE, 4.0))


@run_by(run)
async def test_after_three_failed_merges_in_a_row_all_are_made_in_shared_memory() -> None:
    """A driver whose collectives do not work costs three time-outs, and not one in each cycle."""
    devices = [StubDevice(0, rate=1.0), StubDevice(1, rate=3.0)]
    host = host_of(devices, groups=DeviceGroups("gloo", "/group", 1.0), local_steps=2)
    await host.start()
    for step in range(1, 6):
        await host.train(order(step, 2))
        assert host.delta == pytest.approx(np.full(SIZE, 4.0))
    assert [len(one.members) for one in devices[1].merges] == [2, 1] * 3 + [1, 1]


@run_by(run)
async def test_a_trainer_that_hangs_in_the_merge_of_a_group_is_told_nothing_more() -> None:
    """Not even to write its own delta: it would do both when it goes on, in a step that is over."""
    devices = [StubDevice(0, rate=1.0), StubDevice(1, rate=3.0)]
    host = host_of(devices, groups=DeviceGroups("gloo", "/group", 1.0), local_steps=2)
    await host.start()
    devices[1].hangs_in_merge = True
    async with asyncio.timeout(30.0):
        await host.train(order(1, 2))
    assert host.delta == pytest.approx(np.full(SIZE, 2.0))
    assert [len(device.merges) for device in devices] == [2, 1]


@run_by(run)
async def test_a_trainer_that_hangs_in_a_merge_holds_nobody_up() -> None:
    """The others write their own deltas, and it takes no order before it has come out of the merge."""
    devices = [StubDevice(0, rate=1.0), StubDevice(1, rate=3.0)]
    host = host_of(devices, groups=DeviceGroups("gloo", "/group", 1.0), local_steps=2)
    await host.start()
    training = asyncio.create_task(host.train(order(1, 2)))
    await asyncio.sleep(2.001)
    devices[1].hang()
    async with asyncio.timeout(30.0):
        await training
        assert host.delta == pytest.approx(np.full(SIZE, 2.0))
        await host.train(order(2, 2))
    assert [len(device.orders) for device in devices] == [2, 1]
    devices[1].resume()
    await asyncio.sleep(1.0)
    await host.train(order(3, 2))
    assert [len(device.orders) for device in devices] == [3, 2]


@pytest.mark.parametrize(
    ("names", "backend"),
    [
        (["cuda:0", "cuda:1"], "nccl"),
        (["cuda:0", "cuda:0"], None),
        (["cpu", "cpu"], None),
        (["cpu", "cuda:0"], None),
        (["cuda:0"], None),
    ],
)
def test_nccl_is_for_trainers_with_a_gpu_each(names: list[str], backend: str | None) -> None:
    """NCCL refuses two members on one GPU: there, and on processors, trainers merge in shared memory."""
    assert backend_of(names, gloo=False) == backend


def test_other_members_and_a_failure_make_another_group() -> None:
    """While the members stay the same so does the group; its number and file are new otherwise."""
    groups = DeviceGroups("gloo", "/there/group", 3.0)
    first = groups.orders({0: 0.25, 1: 0.25, 2: 0.5})
    assert [one.weight for one in first.values()] == [0.25, 0.25, 0.5]
    assert [one.writes for one in first.values()] == [True, False, False]
    assert {(one.group, one.place, one.members) for one in first.values()} == {(1, "/there/group.1", (0, 1, 2))}
    assert groups.orders({0: 0.5, 1: 0.25, 2: 0.25})[0].group == 1
    without = groups.orders({1: 0.5, 2: 0.5})
    assert [(one.group, one.writes) for one in without.values()] == [(2, True), (2, False)]
    groups.failed()
    assert groups.orders({1: 0.5, 2: 0.5})[1].place == "/there/group.3"
    assert groups.alone(2).members == (2,)
