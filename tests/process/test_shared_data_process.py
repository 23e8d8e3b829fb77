"""`swarm.sampler` in scripts that are real processes: workers, a restart from saved state, and two ranks of a node."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.environment import Environment
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.system import SystemClock
from p2pnode.training.sharing.service import DataService
from p2pnode.training.supervisor.process_trainer import ProcessTrainer
from p2pnode.training.trainer_link.interface import StepOrder
from tests.harness.environment.simulated import InlineExecutor, MemoryDisk, SeededEntropy
from tests.harness.stubs.scripted_swarm import ScriptedSwarm
from tests.process.harness.trainer_world import World, add, until
from tests.process.test_attached_swarm import BEGIN, LAUNCHER

SIZE = 200

LOOP = (
    BEGIN
    + """
import json
from pathlib import Path
from torch.utils.data import DataLoader
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 200
    def __getitem__(self, index): return index
swarm = p2pnode.attach(model, optimizer, state=state)
loader = DataLoader(Numbers(), batch_size=10, sampler=swarm.sampler(Numbers()), num_workers=2)
while not swarm.done:
    for batch in loader:
        loss = train_once()
        print(json.dumps([swarm.node_index, batch.tolist()]), flush=True)
        swarm.step(samples=len(batch), loss=loss)
        if swarm.done:
            break
"""
)

RANKS = (
    BEGIN
    + """
import json
import os
import torch.distributed as dist
from torch.utils.data import DataLoader
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
swarm = p2pnode.attach(model, optimizer)
loader = DataLoader(range(101), batch_size=10, sampler=swarm.sampler(range(101)))
while not swarm.done:
    for batch in loader:
        loss = train_once()
        os.write(1, (json.dumps([swarm.node_index, batch.tolist()]) + "\\n").encode())
        swarm.step(samples=len(batch), loss=loss)
        if swarm.done:
            break
dist.destroy_process_group()
"""
)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "state")


@contextlib.asynccontextmanager
async def sharing(
    world: World, trainer: ProcessTrainer, swarm: ScriptedSwarm | None = None
) -> AsyncIterator[DataService]:
    """The daemon's side of the data; by default of a node that is alone."""
    environment = Environment(
        clock=SystemClock(),
        entropy=SeededEntropy("share"),
        disk=MemoryDisk(),
        executor=InlineExecutor(),
        log=world.log,
    )
    service = DataService(swarm or ScriptedSwarm(), trainer, 1, environment)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


def order(step: int) -> StepOrder:
    return StepOrder(step, 3, 1.0, is_first=False, node_index=4)


def batches(world: World) -> list[list[int]]:
    """The batches that the script has printed, each checked to be of node 4."""
    lines = (world.state_dir / "trainer.log").read_text().splitlines()
    printed = [json.loads(line) for line in lines if line.startswith("[")]
    assert {index for index, _ in printed} == {4}
    return [batch for _, batch in printed]


def test_a_restarted_script_goes_on_within_its_epoch(world: World) -> None:
    """What the reported turns trained is saved with the script's state; what workers fetched ahead is not."""

    async def scenario(world: World) -> None:
        trainer = world.script(LOOP)
        async with sharing(world, trainer):
            await trainer.start()
            for step in range(1, 4):
                await trainer.train(order(step))
                await add(trainer, step)
            await trainer.save(str(world.state_dir / "saved"))
            await trainer.stop()
        # A new daemon: all that is known comes from the file.
        async with sharing(world, trainer) as service:
            await trainer.start(str(world.state_dir / "saved"))
            for step in range(4, 7):
                await trainer.train(order(step))
                await add(trainer, step)
            assert service.member is not None
            assert service.member.ledger.trained[0, 0].bit_count() == 180
            await trainer.stop()

    world.run(scenario)
    assert len({sample for batch in batches(world) for sample in batch}) == len(batches(world)) * 10 == 180


def test_a_stop_reaches_a_script_that_waits_for_data(world: World) -> None:
    """The loader ends, `swarm.done` takes the last weights, and the script goes on behind its loop."""

    async def scenario(world: World) -> None:
        trainer = world.script(LOOP + "print('left the loop', swarm.done, flush=True)\n")
        silent = ScriptedSwarm(others=[Contact(b"o" * 20, Address("10.0.0.2", 8468))])
        silent.silent.add(b"o" * 20)
        async with sharing(world, trainer, silent) as service:
            await trainer.start()
            training = asyncio.create_task(trainer.train(order(1)))
            await until(lambda: service._wanted is not None, 60)
            training.cancel()
            await trainer.stop(30.0)
            await asyncio.gather(training, return_exceptions=True)

    world.run(scenario)
    assert "left the loop True" in (world.state_dir / "trainer.log").read_text()


def test_the_ranks_of_a_node_share_its_part(world: World, tmp_path: Path) -> None:
    """Two ranks draw different samples, equally many, and together what one process would."""
    (tmp_path / "ranks.py").write_text(RANKS)
    (tmp_path / "launcher.py").write_text(LAUNCHER)

    async def scenario(world: World) -> None:
        trainer = world.trainer(
            command=[sys.executable, str(tmp_path / "launcher.py"), str(tmp_path / "ranks.py"), str(tmp_path / "store")]
        )
        async with sharing(world, trainer) as service:
            await trainer.start()
            report = await trainer.train(order(1))
            assert report.samples == 2 * 30
            await add(trainer, 1)
            await trainer.train(order(2))
            assert service.member is not None
            # Five batches of twenty; the sample that is left comes first in the next epoch.
            assert service.member.ledger.first == (1, 0)
            await trainer.stop()

    world.run(scenario)
    # Two ranks print at the same time, so only whole epochs have an order.
    assert len({sample for batch in batches(world)[:10] for sample in batch}) == 100
