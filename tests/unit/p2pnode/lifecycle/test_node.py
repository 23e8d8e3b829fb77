"""A node's states from start to exit."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from p2pnode.lifecycle import startup
from p2pnode.overlay.addresses import Address
from p2pnode.overlay.peers import Activity
from p2pnode.training.supervisor.gpu_monitor import GpuReading
from p2pnode.training.trainer_link.interface import TrainerFailed
from tests.harness.runner.stories import played_by
from tests.harness.swarms.status_swarm import simulate
from tests.harness.swarms.swarm import Swarm
from tests.harness.trainers.stub_trainer import StepTime, StubTrainer


@played_by(simulate)
async def test_the_states_of_a_run(swarm: Swarm) -> None:
    """A node joins, trains, pauses on request, trains again, and ends with "leave"."""
    host = swarm.start("n0")
    node = host.living
    assert (node.state, node.budget()) == ("joining", None)
    await swarm.until(lambda: node.progress.step >= 2, within_s=30, what="it trains")
    assert node.budget() is not None
    assert node.nodes_ready() == 1

    node.pause()
    assert node.state == "paused"
    await asyncio.sleep(3.0)
    step = node.progress.step
    await asyncio.sleep(3.0)
    assert node.progress.step == step
    node.resume()
    await swarm.until(lambda: node.progress.step > step, within_s=30, what="it trains again")

    node.leave()
    assert host.task is not None
    assert await host.task == "leave"


@played_by(simulate)
async def test_a_pause_before_training_holds(swarm: Swarm) -> None:
    """A node that is paused while it starts makes no step until it is resumed."""
    node = swarm.start("n0").living
    node.pause()
    await asyncio.sleep(10.0)
    assert (node.state, node.progress.step) == ("paused", 0)

    node.resume()
    await swarm.until(lambda: node.progress.step >= 1, within_s=30, what="a step")


@pytest.mark.parametrize("method", ["bsp", "ssp", "pssp"])
def test_nodes_that_begin_together_make_their_first_step_together_though_one_compiles(method: str) -> None:
    """With `min_nodes = 2` the first step of one takes three minutes: the other does not run ahead of it, and both
    make all steps."""

    def trainer(name: str) -> StubTrainer:
        slow: StepTime = lambda _generator, step: 180.0 if step == 1 else 1.0  # noqa: E731
        return StubTrainer(name, step_s=slow if name == "n1" else 1.0)

    async def scenario(swarm: Swarm) -> None:
        quick, slow = (host.living for host in swarm.start_many(2))
        await swarm.until(lambda: quick.progress.step >= 1, within_s=60, what="the quick one trains")
        await asyncio.sleep(120.0)
        allowed = 1 if method == "bsp" else 5
        assert (slow.progress.step, quick.progress.step) == (0, allowed)
        assert quick.state == "waiting"
        await swarm.until(lambda: not swarm.running(), within_s=200, what="both end")
        assert all(len(host.trainer.trained) == 20 for host in swarm.hosts.values() if host.trainer is not None)

    settings = {"training__max_steps": 20, "training__min_nodes": 2, "barrier__method": method, "exchange__shards": 4}
    simulate(scenario, make_trainer=trainer, **settings)


def test_other_nodes_on_this_machine_that_have_not_begun_are_counted() -> None:
    """Their memory is free still, and will not be; those that train have theirs, and others are elsewhere."""

    def peer(host: str, activity: Activity) -> Any:
        return SimpleNamespace(activity=activity, contact=SimpleNamespace(address=Address(host, 8468)))

    peers = [
        peer("10.0.0.1", Activity.READY),
        peer("10.0.0.1", Activity.JOINING),
        peer("127.0.0.1", Activity.READY),
        peer("10.0.0.1", Activity.TRAINING),
        peer("10.0.0.2", Activity.READY),
    ]
    overlay = SimpleNamespace(address=Address("10.0.0.1", 1), members=lambda: peers)

    assert startup.Startup._others_about_to_begin(cast(Any, SimpleNamespace(overlay=overlay))) == 3


@played_by(simulate)
async def test_a_model_that_cannot_fit_is_refused_before_it_is_exchanged(swarm: Swarm) -> None:
    """The sums are in the message, the trainer's estimate among them, and /status has it."""
    host = swarm.start("n0")
    await swarm.until(lambda: host.living.progress.step >= 1, within_s=30, what="it trains")
    assert host.living.trainer_bytes == 0

    swarm.available_memory = 1000
    refused = swarm.start("n1", bootstrap="n0")
    assert refused.task is not None
    await asyncio.wait([refused.task], timeout=60)
    assert "more memory" in str(refused.task.exception())
    assert host.living.state == "training"


@played_by(simulate)
async def test_what_the_driver_has_reported_is_in_the_last_sentence(swarm: Swarm) -> None:
    """A trainer that its GPU has ended may not know why."""
    host = swarm.start("n0")
    await swarm.until(lambda: host.living.progress.step >= 1, within_s=30, what="it trains")
    host.living.gpus.readings = {"cuda:0": GpuReading("H100", error="Xid 79: it is gone"), "cuda:1": GpuReading("H100")}
    assert isinstance(host.trainer, StubTrainer)
    host.trainer.fail_start = TrainerFailed("it is gone", fatal=True)
    host.trainer.crash_next()
    assert host.task is not None
    await asyncio.wait([host.task], timeout=60)
    assert str(host.task.exception()).endswith("; the driver reports of cuda:0: Xid 79: it is gone")


@played_by(simulate)
async def test_the_memory_check_is_told_of_everything(swarm: Swarm, *, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes that are waited for, the checkpoints, the trainer's estimate, and the other nodes on the machine."""
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(startup, "check_memory", lambda *args, **more: told.append({"nodes": args[3]} | more))
    monkeypatch.setattr(startup.Startup, "_others_about_to_begin", lambda _: 2)
    start = StubTrainer.start

    async def estimating(self: StubTrainer, *args: Any, **more: Any) -> Any:
        return msgspec.structs.replace(await start(self, *args, **more), host_bytes=77, device_bytes=5)

    monkeypatch.setattr(StubTrainer, "start", estimating)
    host = swarm.start("n0", training__min_nodes=3, training__checkpoint_s=5.0)
    await swarm.until(lambda: bool(told), within_s=30, what="memory is checked")
    assert told == [{"nodes": 3, "checkpoints": True, "trainer_bytes": 77, "others_here": 2, "base_on_device": True}]
    assert host.living.trainer_bytes == 77
    assert host.living.budget().base == 0
