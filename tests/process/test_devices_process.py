"""Several trainers of one node, each a real process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from p2pnode.overlay.environment import Environment
from p2pnode.overlay.system import FolderDisk, SystemClock, SystemEntropy, ThreadExecutor
from p2pnode.training.devices.host import HostTrainer
from p2pnode.training.devices.start import make_trainer
from p2pnode.training.settings import DevicesSettings, TrainingSettings
from p2pnode.training.supervisor.launch import NodeStart
from p2pnode.training.supervisor.silence import HANG_S
from p2pnode.training.trainer.state.snapshot import seed_all
from p2pnode.training.trainer_link.interface import StepOrder, TrainerFailed
from p2pnode.training.trainer_link.messages import derive_node_seed, trainer_id
from tests.harness.project.repository import ROOT
from tests.harness.runner.stories import played_by
from tests.harness.trainers.tasks import Plain
from tests.process.harness.trainer_world import World, is_running, until
from tests.process.test_shared_data_process import sharing

NODE = b"n" * 20


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(ROOT)  # Where `tests.harness.trainers.tasks` is found.
    return World(tmp_path / "state")


def host(
    world: World,
    devices: str,
    command: list[str] | None = None,
    *,
    hang_s: float = HANG_S,
    gloo: bool = False,
    **settings: object,
) -> HostTrainer:
    """The trainer of a node with these devices, which ends with the world."""
    of_devices = {key: settings.pop(key) for key in ("period", "step", "pull") if key in settings}
    settings = {"task": "tests.harness.trainers.tasks:Plain", "threads": 1, **settings}
    environment = Environment(
        clock=SystemClock(),
        entropy=SystemEntropy(),
        disk=FolderDisk(world.state_dir),
        executor=ThreadExecutor(),
        log=world.log,
    )
    trainer = make_trainer(
        TrainingSettings(device=devices, **settings),
        DevicesSettings(**of_devices),
        command=command,
        node=NodeStart(NODE, 1),
        state_dir=world.state_dir,
        environment=environment,
        on_state=world.states.append,
        on_output=None,
        hang_s=hang_s,
        merges_by_gloo=gloo,
    )
    assert isinstance(trainer, HostTrainer)
    world.trainers.append(trainer)
    return trainer


def order(step: int, local_steps: int) -> StepOrder:
    return StepOrder(step, local_steps, 1.0, True)


ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here")


async def add(trainer: HostTrainer, step: int) -> None:
    """Add the delta to the vector, as the owner of all would, and let the value enter."""
    trainer.vector += trainer.delta
    trainer.encoded()
    await trainer.arrived(step)


@pytest.mark.parametrize(
    ("device", "count"), [("cpu", 4), pytest.param("cuda:0", 2, marks=[pytest.mark.cuda, ON_A_GPU])]
)
def test_trainers_with_a_period_of_one_are_one_process_on_the_joined_batch(
    world: World, device: str, count: int
) -> None:
    """With plain SGD the node's vector is, to 1e-5, that of one model trained on all their batches together, and the
    batches of the trainers differ. On a GPU two trainers share it."""
    steps, turns = 5, 3

    async def scenario(world: World) -> np.ndarray:
        trainer = host(world, f"{device}*{count}", period=1, local_steps=steps)
        await trainer.start()
        for step in range(1, turns + 1):
            report = await trainer.train(order(step, steps))
            assert report.samples == count * 8 * steps
            await add(trainer, step)
        await trainer.stop()
        return trainer.vector.copy()

    swarm = world.run(scenario)

    seed_all(0)
    tasks = [
        Plain({}, data_dir="", seed=0, node_seed=derive_node_seed(0, trainer_id(NODE, index)), device="cpu")
        for index in range(count)
    ]
    spec = tasks[0].build()
    draws = [iter(task.batches()) for task in tasks]
    first = [next(draw) for draw in draws]
    assert not any(torch.equal(first[0][0], other[0]) for other in first[1:])
    for number in range(steps * turns):
        batches = first if number == 0 else [next(draw) for draw in draws]
        joined = torch.cat([inputs for inputs, _ in batches]), torch.cat([outputs for _, outputs in batches])
        spec.optimizer.zero_grad()
        tasks[0].loss(spec.model, joined).backward()
        spec.optimizer.step()
    parameters = sorted(spec.model.named_parameters())
    alone = torch.cat([parameter.detach().reshape(-1) for _, parameter in parameters]).numpy()

    assert np.abs(swarm - alone).max() < 1e-5


@pytest.mark.promise(16)
@played_by("world.run")
async def test_a_killed_trainer_comes_back_beside_the_others_and_a_stopped_one_is_waited_for_by_nobody(
    world: World,
) -> None:
    """SIGKILL of one: the step ends, and a later one has it again. SIGSTOP of one: it is left out until it goes on.
    When all are killed the step fails, and a start brings all back."""
    trainer = host(
        world,
        "cpu*3",
        local_steps=20,
        hang_s=0.3,
        task="tests.harness.trainers.tasks:Slow",
        options={"seconds": 0.01},
    )
    await trainer.start()
    await trainer.train(order(1, 20))
    pids = [one.pid for one in trainer.devices()]
    assert len(set(pids)) == 3

    assert pids[1] is not None
    training = asyncio.create_task(trainer.train(order(2, 100)))  # longer than a late test needs
    await asyncio.sleep(0.05)
    os.kill(pids[1], signal.SIGKILL)
    async with asyncio.timeout(60):
        await training
        await until(lambda: world.log.fields("device_restarted") != [])
        await trainer.train(order(3, 20))
    # A loaded machine may make any silent for 0.3 s.
    await until(lambda: [one.state for one in trainer.devices()] == ["running"] * 3)
    facts = trainer.devices()
    assert [one.failures for one in facts] == [0, 1, 0]
    assert (facts[0].pid, facts[2].pid) == (pids[0], pids[2])
    assert facts[1].pid not in pids

    stopped = facts[2].pid
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    try:
        async with asyncio.timeout(60):
            await trainer.train(order(4, 20))
        assert trainer.devices()[2].state == "hung"
    finally:
        os.kill(stopped, signal.SIGCONT)
    before = trainer.devices()[2].optimizer_steps
    async with asyncio.timeout(180):
        for step in range(5, 200):
            await trainer.train(order(step, 20))
            if trainer.devices()[2].optimizer_steps > before + 20:
                break
        else:
            pytest.fail("the stopped trainer has not come back")

    training = asyncio.create_task(trainer.train(order(200, 100_000)))
    await asyncio.sleep(0.05)
    living = [one.pid for one in trainer.devices() if one.pid is not None]
    for pid in living:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(TrainerFailed):
        await training
    await trainer.start()
    await trainer.train(order(200, 20))
    await trainer.stop()
    assert not any(is_running(one.pid) for one in trainer.devices() if one.pid is not None)


def test_a_device_that_this_machine_has_not_ends_the_start_with_its_name(world: World) -> None:
    """The failure names the device, is fatal, and leaves no process of the other devices."""

    async def scenario(world: World) -> None:
        trainer = host(world, "cpu,cuda:61", local_steps=2)
        with pytest.raises(TrainerFailed, match=r"device cuda:61: ") as failed:
            await trainer.start()
        assert failed.value.fatal
        await trainer.stop()

    world.run(scenario)
    started = [fields["pid"] for fields in world.log.fields("trainer_started")]
    assert not any(is_running(pid) for pid in started)


@played_by("world.run")
async def test_trainers_that_raise_in_their_first_turn_end_the_run(world: World) -> None:
    """A fault of the task is the same on every device: the step fails with the reason, and nothing is restarted."""
    trainer = host(world, "cpu*2", local_steps=2, task="tests.harness.trainers.tasks:Vectorial")
    await trainer.start()
    async with asyncio.timeout(60):
        with pytest.raises(TrainerFailed) as failed:
            await trainer.train(order(1, 2))
    assert failed.value.fatal
    await trainer.stop()


@played_by("world.run")
async def test_leaders_pull_the_trainers_of_a_node_together(world: World) -> None:
    """With leader steps the node learns, and one of them leads."""
    trainer = host(world, "cpu*2", local_steps=8, period=4, step="leader", pull=0.5)
    await trainer.start()
    before = await trainer.evaluate(0)
    for step in range(1, 12):
        await trainer.train(order(step, 8))
        await add(trainer, step)
    after = await trainer.evaluate(11)
    assert before is not None
    assert after is not None
    assert after.metrics["error"] < 0.6 * before.metrics["error"]
    assert sum(one.leads for one in trainer.devices()) == 1
    await trainer.stop()


SCRIPT = """
import pathlib, sys
import torch
import p2pnode

torch.manual_seed(3)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
swarm = p2pnode.attach(model, optimizer)


name = f"{swarm.device_index}-of-{swarm.device_count}-{round(swarm.workers)}-{swarm.node_index}"
pathlib.Path(sys.argv[1], name).write_text(str(swarm.seed))
while not swarm.done:
    inputs = torch.randn(8, 4)
    loss = model(inputs).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    swarm.step(samples=8, loss=loss)
"""


def test_a_script_runs_once_per_device_and_knows_its_place(world: World, tmp_path: Path) -> None:
    """Each process has its index, a seed of its own and its share of the local steps; they merge by torch.distributed,
    and all end at the end of the run."""
    seen = tmp_path / "seen"
    seen.mkdir()
    (tmp_path / "train.py").write_text(SCRIPT)

    async def scenario(world: World) -> None:

        command = [sys.executable, str(tmp_path / "train.py"), str(seen)]
        trainer = host(world, "cpu*2", command, local_steps=6, period=3, gloo=True)
        await trainer.start()
        for step in range(1, 4):
            report = await trainer.train(order(step, 6))
            assert report.samples == 2 * 6 * 8
            assert 0.0 < np.abs(trainer.delta).max() < 1.0
            await add(trainer, step)
        end = await trainer.finish("max_steps", 60.0)
        assert (end.exit_code, end.cut_short) == (0, False)
        assert world.log.fields("devices_not_merged") == []

    world.run(scenario)
    assert sorted(path.name for path in seen.iterdir()) == ["0-of-2-2-0", "1-of-2-2-1"]
    assert len({path.read_text() for path in seen.iterdir()}) == 2


def test_a_merge_by_torch_distributed_is_that_in_shared_memory(world: World, tmp_path: Path) -> None:
    """With gloo the node's vector is the same, to rounding, as with shared memory, also in the cycles within a step.
    When a trainer has died the others merge without it, and when it is back with it."""
    found = {}

    async def scenario(world: World) -> np.ndarray:
        trainer = host(world, "cpu*3", period=1, local_steps=4, gloo=gloo)
        await trainer.start()
        for step in range(1, 4):
            await trainer.train(order(step, 4))
            await add(trainer, step)
        if gloo:
            assert (world.state_dir / "devices").is_dir()
            pid = trainer.devices()[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            for step in range(4, 9):
                await trainer.train(order(step, 4))
            await until(lambda: world.log.fields("device_restarted") != [])
            before = trainer.devices()[0].optimizer_steps
            await trainer.train(order(9, 4))
            await trainer.train(order(10, 4))
            assert trainer.devices()[0].optimizer_steps > before
            assert np.isfinite(trainer.delta).all()
            assert world.log.fields("devices_not_merged") == []
        await trainer.stop()
        return trainer.vector.copy()

    for gloo in (False, True):
        found[gloo] = (World(tmp_path / "other") if gloo else world).run(scenario)
    assert np.abs(found[False]).max() > 0.01
    assert np.abs(found[False] - found[True]).max() < 1e-6


SAMPLING = """
import json, os, sys
import torch
from torch.utils.data import DataLoader
import p2pnode

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
swarm = p2pnode.attach(model, optimizer)
loader = DataLoader(range(180), batch_size=10, sampler=swarm.sampler(range(180)))
while not swarm.done:
    for batch in loader:
        optimizer.zero_grad()
        model(torch.randn(8, 4)).pow(2).mean().backward()
        optimizer.step()
        os.write(1, (json.dumps(batch.tolist()) + "\\n").encode())
        swarm.step(samples=len(batch), loss=1.0)
        if swarm.done:
            break
"""


@pytest.mark.long
def test_the_trainers_of_a_node_divide_the_samples_of_an_epoch(world: World, tmp_path: Path) -> None:
    """`swarm.sampler` gives each sample of an epoch to one of the processes, and after an epoch all are trained."""
    (tmp_path / "train.py").write_text(SAMPLING)

    async def scenario(world: World) -> None:
        trainer = host(world, "cpu*2", [sys.executable, str(tmp_path / "train.py")], local_steps=3, period=1)
        async with sharing(world, trainer):
            await trainer.start()
            for step in range(1, 5):
                await trainer.train(order(step, 3))
                await add(trainer, step)
            await trainer.stop(10.0)

    world.run(scenario)
    logs = [world.state_dir / "trainer.log", world.state_dir / "devices" / "1" / "trainer.log"]
    taken = [
        [sample for line in log.read_text().splitlines() if line.startswith("[") for sample in json.loads(line)]
        for log in logs
    ]
    # A process that has ended its part of the epoch begins the next one while the other is still at it.
    counts = Counter(taken[0] + taken[1])
    assert sorted(counts) == list(range(180))
    assert max(counts.values()) <= 2
    assert min(map(len, taken)) >= 60
