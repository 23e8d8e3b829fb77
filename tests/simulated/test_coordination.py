"""Nodes with several trainers each that share their local steps and follow one leader, on the simulated network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, cast

import numpy as np
import pytest

from p2pnode.training.devices.coordination import Coordination
from p2pnode.training.devices.host import HostTrainer
from p2pnode.training.devices.positions import LeaderPositions
from p2pnode.training.trainer_link.interface import Vector
from tests.harness.runner.stories import played_by
from tests.harness.swarms.simulated_swarm import play
from tests.harness.swarms.swarm import Host, Swarm
from tests.harness.trainers.stub_device import StubDevice, host_of
from tests.harness.trainers.stub_trainer import StubTrainer

LOCAL_STEPS = 8
Devices = dict[str, list[StubDevice]]


def simulate(
    scenario: Callable[[Swarm, Devices], Awaitable[None]], *, seed: int, paces: list[float], **of_devices: Any
) -> Swarm:
    """Nodes n0, n1, …, each with two trainers that take `paces[n]` seconds for a local step."""
    devices: Devices = {}

    def make(name: str) -> StubTrainer:
        pace_s = paces[int(name[1:])]
        devices[name] = [StubDevice(index, rate=1.0 / 1024.0, pace_s=pace_s) for index in range(2)]
        host = host_of(devices[name], local_steps=LOCAL_STEPS, **of_devices)
        return cast(StubTrainer, host)

    settings = {f"devices.{key}": value for key, value in of_devices.items()}
    settings |= {"training.local_steps": LOCAL_STEPS, "training.min_nodes": len(paces), "exchange.shards": 2}
    settings |= {"barrier.method": "bsp"}
    return play(lambda swarm: scenario(swarm, devices), lambda: Swarm(seed=seed, settings=settings, make_trainer=make))


def coordination(host: Host) -> Coordination:
    found = cast(HostTrainer, host.living.trainer).coordination
    assert found is not None
    return found


def step_of(swarm: Swarm) -> int:
    return min(swarm.steps())


def steps_by_step(devices: Devices) -> dict[int, Counter[str]]:
    """For each step of the swarm: how many local steps the trainers of each node took in it."""
    found: dict[int, Counter[str]] = {}
    for name, those in devices.items():
        for device in those:
            for order, steps in zip(device.orders, device.taken, strict=False):
                found.setdefault(order.step, Counter())[name] += steps
    return found


@played_by(simulate, seed=1, paces=[1.0, 1.0, 0.4], coordination="global")
async def test_nodes_share_the_local_steps_and_another_takes_the_role_over(swarm: Swarm, devices: Devices) -> None:
    """One node is the server of all; a step of the swarm has W · local_steps, of which the fast node takes more. When
    the server is killed the others go on with one of them, with the steps of those that are left."""
    swarm.start_many(3)
    await swarm.until(lambda: len(swarm.running()) == 3 and step_of(swarm) >= 6, within_s=600, what="six steps")
    servers = {coordination(host).server for host in swarm.running()}
    assert len(servers) == 1
    (serving,) = [host for host in swarm.running() if coordination(host).serves]
    counted = steps_by_step(devices)
    for step in range(2, 6):
        assert counted[step].total() == 3 * 2 * LOCAL_STEPS, f"step {step}: {counted[step]}"
        assert counted[step]["n2"] > 1.5 * counted[step]["n0"]

    dead = serving.living.overlay.node_id
    await swarm.kill(serving.name)
    begun = step_of(swarm)
    await swarm.until(lambda: step_of(swarm) >= begun + 8, within_s=600, what="eight steps without it")
    servers = {coordination(host).server for host in swarm.running()}
    assert len(servers) == 1
    assert dead not in servers
    assert sum(coordination(host).serves for host in swarm.running()) == 1
    counted = steps_by_step({name: those for name, those in devices.items() if name != serving.name})
    for step in range(begun + 5, begun + 8):
        assert counted[step].total() == 2 * 2 * LOCAL_STEPS, f"step {step}: {counted[step]}"


@played_by(simulate, seed=5, paces=[0.2, 0.2, 0.2], coordination="global")
async def test_a_dead_node_has_no_share_of_the_steps(swarm: Swarm, devices: Devices) -> None:
    """When a node dies that is no server, a step has the local steps of those that are left, without waiting."""
    swarm.start_many(3)
    await swarm.until(lambda: len(swarm.running()) == 3 and step_of(swarm) >= 3, within_s=600, what="three steps")
    other = next(host for host in swarm.running() if not coordination(host).serves)
    await swarm.kill(other.name)
    begun = step_of(swarm)
    await swarm.until(lambda: step_of(swarm) >= begun + 4, within_s=20, what="four steps without it")
    counted = steps_by_step({name: those for name, those in devices.items() if name != other.name})
    assert counted[begun + 3].total() == counted[begun + 4].total() == 2 * 2 * LOCAL_STEPS, str(counted)


def test_a_node_that_reaches_no_server_takes_its_own_share() -> None:
    """Where no other node coordinates, and none may hold the role, each step has the node's own local steps."""

    async def scenario(swarm: Swarm, devices: Devices) -> None:
        host = swarm.start("n0")
        await swarm.until(lambda: host.node is not None and host.node.exchange is not None, within_s=60, what="start")
        coordination_of = coordination(host)

        async def nobody(_key: bytes) -> list[object]:
            return []

        host.living.overlay.candidates = nobody
        begun = host.living.progress.step
        await swarm.until(lambda: step_of(swarm) >= begun + 6, within_s=600, what="six steps")
        assert coordination_of.server == b""
        counted = steps_by_step(devices)
        assert [counted[step].total() for step in range(begun + 3, begun + 6)] == [2 * LOCAL_STEPS] * 3

    swarm = simulate(scenario, seed=2, paces=[1.0], coordination="global")
    assert len(swarm.of("coordination_alone")) == 1


@played_by(simulate, seed=3, paces=[1.0, 1.0], coordination="global", step="leader", pull=0.2)
async def test_all_nodes_follow_the_leader_with_the_lowest_loss(swarm: Swarm, devices: Devices) -> None:
    """The node with the best trainer leads the swarm; the others have its values, to bfloat16, and are pulled to them.
    When it dies another leads."""
    swarm.start_many(2)
    for number in range(2):
        for index, device in enumerate(devices[f"n{number}"]):
            device.recent_loss = 1.0 - 0.5 * number - 0.1 * index
            device.rate = (1 + index + 2 * number) / 8.0
    await swarm.until(lambda: len(swarm.running()) == 2 and step_of(swarm) >= 6, within_s=600, what="six steps")
    n0, n1 = (swarm.hosts[name] for name in ("n0", "n1"))
    assert coordination(n0).leader == coordination(n1).leader == n1.living.overlay.node_id
    orders = [device.orders[-1] for those in devices.values() for device in those]
    assert all(one.global_pull == pytest.approx(0.2 / LOCAL_STEPS) for one in orders)
    assert all(one.local_pull == pytest.approx(0.2 / LOCAL_STEPS) for one in orders)
    # What the other node gets is what the leader's node has at that time, to bfloat16.
    led, follows = (cast(HostTrainer, host.living.trainer).positions for host in (n1, n0))
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    follow = follows.follow

    def look(values: Vector | None) -> None:
        leading = led.leading
        assert values is not None
        assert leading is not None
        seen.append((values, leading.copy()))
        follow(values)
        assert isinstance(follows, LeaderPositions)
        assert follows._whole is not None
        assert np.array_equal(follows._whole, values)

    follows.follow = look
    begun = step_of(swarm)
    await swarm.until(lambda: step_of(swarm) >= begun + 3, within_s=600, what="three steps")
    follows.follow = follow
    assert seen
    for values, leading in seen:
        assert np.abs(values - leading).max() <= np.abs(leading).max() / 128
        own = follows.leading
        assert own is not None
        assert np.abs(own - leading).max() > np.abs(leading).max() / 32

    await swarm.kill("n1")
    begun = step_of(swarm)
    await swarm.until(lambda: step_of(swarm) >= begun + 6, within_s=600, what="six steps alone")
    assert coordination(n0).leader == n0.living.overlay.node_id


@played_by(simulate, seed=4, paces=[1.0, 0.4])
async def test_without_coordination_no_node_has_a_part_in_it(swarm: Swarm, devices: Devices) -> None:
    """By default nobody leases, and each node has its own local steps."""
    swarm.start_many(2)
    await swarm.until(lambda: len(swarm.running()) == 2 and step_of(swarm) >= 4, within_s=600, what="four steps")
    assert all(cast(HostTrainer, host.living.trainer).coordination is None for host in swarm.running())
    counted = steps_by_step(devices)
    assert all(counted[step] == Counter(n0=2 * LOCAL_STEPS, n1=2 * LOCAL_STEPS) for step in range(1, 4))
