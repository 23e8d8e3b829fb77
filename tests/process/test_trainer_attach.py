"""`p2pnode.attach` in scripts of the user's own, each a real process under a `ProcessTrainer`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.harness.repository import ROOT
from tests.process.harness.trainer_world import World, is_running, until
from training.trainer_link.interface import StepOrder, TrainerFailed

#: Half of a script's start is the import of torch's compiler, which its optimizer causes (`lazy_dynamo`).
NO_COMPILER = """
from training.trainer.lazy_dynamo import import_later
import_later()
"""

BEGIN = (
    NO_COMPILER
    + """
import sys
import torch
from torch import nn
import p2pnode
torch.manual_seed(3)
inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(5))
outputs = inputs.sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
state = {"count": 0}
def train_once():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), outputs)
    loss.backward()
    optimizer.step()
    scheduler.step()
    return loss
"""
)

LOOP = (
    BEGIN
    + """
swarm = p2pnode.attach(model, optimizer, scheduler, state=state)
print("attached", swarm.step_number, swarm.workers, swarm.is_first, state["count"], swarm.samples_seen, flush=True)
while not swarm.done:
    loss = train_once()
    state["count"] += 1
    swarm.step(samples=64, loss=loss, count=state["count"])
print("done", model[0].bias.tolist(), flush=True)
"""
)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "state")


def order(step: int, local_steps: int = 5) -> StepOrder:
    return StepOrder(step, local_steps, 2.0, True)


def test_a_script_trains_and_ends_with_the_shared_weights(world: World) -> None:
    """The whole way: attach, turns, metrics, no evaluation of its own, done; its last weights are the vector."""

    async def scenario(world: World) -> np.ndarray:
        trainer = world.script(LOOP.removeprefix(NO_COMPILER))
        hello = await trainer.start()
        assert (hello.task, hello.evaluates) == ("attached", False)
        assert [entry.name for entry in hello.layout.entries] == ["0.bias", "0.weight", "2.bias", "2.weight"]
        first = await trainer.train(order(1))
        trainer.vector += trainer.delta
        second = await trainer.train(order(2))
        trainer.vector += trainer.delta
        assert (first.step, first.samples, first.optimizer_steps) == (1, 320, 5)
        assert second.loss < first.loss
        assert second.metrics["count"] == 8
        assert await trainer.evaluate(2) is None
        described = await trainer.describe(str(world.state_dir / "model"), wait=True)
        assert [source.name for source in described.tensors] == ["0.weight", "0.bias", "2.weight", "2.bias"]
        final = trainer.vector[:8].copy()
        await trainer.stop()
        return final

    final = world.run(scenario)
    printed = (world.state_dir / "trainer.log").read_text()
    assert "attached 1 2.0 True 0 0" in printed
    assert np.allclose(json.loads(printed.split("done")[1]), final)


def test_a_script_resumes_as_if_it_had_not_been_interrupted(world: World, tmp_path: Path) -> None:
    """Optimiser, schedule and the script's own state come back; the result equals that of an uninterrupted run."""

    async def whole(world: World) -> np.ndarray:
        trainer = world.script(LOOP)
        await trainer.start()
        for step in range(1, 7):
            await trainer.train(order(step))
            trainer.vector += trainer.delta
        return trainer.vector.copy()

    async def halves(world: World) -> np.ndarray:
        trainer = world.script(LOOP)
        await trainer.start()
        for step in range(1, 7):
            await trainer.train(order(step))
            trainer.vector += trainer.delta
            if step == 3:
                await (await trainer.save(str(world.state_dir / "saved")))
                await trainer.stop()
                await trainer.start(str(world.state_dir / "saved"))
        return trainer.vector.copy()

    expected = world.run(whole)
    other = World(tmp_path / "other")
    assert np.array_equal(other.run(halves), expected)
    assert "attached 4 2.0 True 15 960" in (other.state_dir / "trainer.log").read_text()


def test_a_late_joiner_has_the_schedule_of_the_others(world: World) -> None:
    """The scheduler is moved to the swarm's position, and the swarm's weights replace the script's own."""

    async def scenario(world: World) -> None:
        trainer = world.script(LOOP)
        await trainer.start()
        trainer.vector[:] = 0.5
        report = await trainer.train(order(10))
        # cosine at 50 of 100 optimiser steps
        assert report.metrics["learning_rate"] == pytest.approx(0.005, rel=1e-4)

    world.run(scenario)


def test_a_script_that_ends_too_early_fails_with_a_hint(world: World) -> None:
    """Exit code 0 without being done is a script that would do the same again."""

    async def scenario(world: World) -> None:
        trainer = world.script(BEGIN + "swarm = p2pnode.attach(model, optimizer)\ntrain_once(); swarm.step(loss=1.0)\n")
        await trainer.start()
        with pytest.raises(TrainerFailed, match="ended before the swarm was done") as failure:
            await trainer.train(order(1))
        assert failure.value.fatal
        assert "until swarm.done" in failure.value.hint

    world.run(scenario)


def test_a_script_that_raises_is_a_crash(world: World) -> None:
    """The last line of the traceback is in the sentence."""

    async def scenario(world: World) -> None:
        trainer = world.script(
            LOOP.replace("loss = train_once()", "loss = train_once(); assert not swarm.step_number > 1")
        )
        await trainer.start()
        await trainer.train(order(1))
        with pytest.raises(TrainerFailed, match="exit code 1: AssertionError") as failure:
            await trainer.train(order(2))
        assert not failure.value.fatal

    world.run(scenario)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
        ("print('hello')", "ended before the swarm was done"),
        (BEGIN + "model.requires_grad_(False)\np2pnode.attach(model, optimizer)", "no trainable parameter"),
        (
            BEGIN + "import os; os.environ['WORLD_SIZE'] = '2'\np2pnode.attach(model, optimizer)",
            "torch.distributed.init_process_group",
        ),
    ],
    ids=["no module", "no attach", "frozen", "no process group"],
)
def test_a_script_that_cannot_attach_is_fatal(world: World, text: str, reason: str) -> None:
    """Before there is a model, another start would do the same."""

    async def scenario(world: World) -> None:
        with pytest.raises(TrainerFailed) as failure:
            await world.script(text).start()
        assert reason in failure.value.reason + failure.value.hint
        assert failure.value.fatal

    world.run(scenario)


def test_a_command_that_does_not_exist_is_named(world: World) -> None:
    """`p2pnode run -- pyhton train.py`."""

    async def scenario(world: World) -> None:
        with pytest.raises(TrainerFailed, match="could not be started: pyhton") as failure:
            await world.trainer(command=["pyhton", "train.py"]).start()
        assert failure.value.fatal

    world.run(scenario)


@pytest.mark.parametrize("package", ["training", "overlay"])
def test_a_users_folder_beside_the_script_is_named(world: World, package: str) -> None:
    """A folder `training` beside train.py hides ours; the sentence names it."""
    folder = world.state_dir / "users" / package
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()

    async def scenario(world: World) -> None:
        with pytest.raises(TrainerFailed) as failure:
            await world.script(LOOP.removeprefix(NO_COMPILER)).start()
        assert f"the folder {folder} hides p2pnode's package {package}" in failure.value.reason

    world.run(scenario)


def test_attach_outside_of_a_node_says_how_to_start_the_script(tmp_path: Path) -> None:
    """Without the daemon's variable there is one sentence."""
    (tmp_path / "train.py").write_text(LOOP)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("P2PNODE_")}

    done = subprocess.run(
        [sys.executable, str(tmp_path / "train.py")], capture_output=True, text=True, env=environment, check=False
    )

    assert done.returncode == 1
    assert "`p2pnode run -- python train.py`" in done.stderr.splitlines()[-1]


def test_importing_p2pnode_does_not_import_torch() -> None:
    """Accessing `p2pnode.attach` imports torch; importing `p2pnode` does not."""
    text = (
        "import sys, p2pnode; print(p2pnode.__version__, 'torch' in sys.modules, 'numpy' in sys.modules); "
        "p2pnode.attach; print('torch' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, cwd=ROOT, check=True)

    assert done.stdout.split() == ["0.1.0", "False", "False", "True"]


def test_a_cancelled_turn_of_a_script_is_left(world: World) -> None:
    """The script continues with the next turn, from the vector, without the cancelled steps."""

    async def scenario(world: World) -> None:
        trainer = world.script(LOOP.replace('state["count"] += 1', "import time; time.sleep(0.01)"))
        await trainer.start()
        training = asyncio.create_task(trainer.train(order(1, 10_000)))
        await asyncio.sleep(0.3)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
        async with asyncio.timeout(10):
            await (await trainer.save(str(world.state_dir / "saved")))
            assert (await trainer.train(order(2, 3))).optimizer_steps == 3

    world.run(scenario)


def test_a_script_ends_with_its_daemon(tmp_path: Path) -> None:
    """When the daemon is killed the script ends too."""
    (tmp_path / "train.py").write_text(LOOP)
    text = f"""
import asyncio, sys
from pathlib import Path
from tests.process.harness.trainer_world import World
from training.trainer_link.interface import StepOrder
async def main():
    world = World(Path({str(tmp_path / "state")!r}))
    trainer = world.trainer(command=[sys.executable, {str(tmp_path / "train.py")!r}])
    print((await trainer.start()).pid, flush=True)
    await trainer.train(StepOrder(1, 10_000_000, 1.0, True))
asyncio.run(main())
"""
    daemon = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert daemon.stdout is not None
    pid = int(daemon.stdout.readline())
    daemon.send_signal(signal.SIGKILL)
    daemon.communicate()

    end_s = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not is_running(pid)


RANKS = (
    BEGIN
    + """
import os
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
with torch.no_grad():
    model[0].bias.add_(rank)  # Only rank 0's weights may count.
wrapped = DistributedDataParallel(model)
swarm = p2pnode.attach(wrapped, optimizer)
half = slice(rank, None, 2)
while not swarm.done:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(wrapped(inputs[half]), outputs[half])
    loss.backward()
    optimizer.step()
    swarm.step(samples=32, loss=loss)
# In one write: print makes two of line and end where nothing is buffered, and the other rank writes between them.
line = f"rank {rank} {swarm.step_number} {swarm.samples_seen} {model[0].bias.tolist()}\\n"
os.write(1, line.encode())
dist.destroy_process_group()
"""
)

LAUNCHER = """
import subprocess, sys
ranks = [subprocess.Popen([sys.executable, sys.argv[1], str(rank), sys.argv[2]]) for rank in (0, 1)]
sys.exit(max(rank.wait() for rank in ranks))
"""


def test_two_ranks_train_as_one_node(world: World, tmp_path: Path) -> None:
    """gloo, two processes: rank 0 reports, samples add up, and both end with the shared weights."""
    (tmp_path / "ranks.py").write_text(RANKS)
    (tmp_path / "launcher.py").write_text(LAUNCHER)

    async def scenario(world: World) -> None:
        trainer = world.trainer(
            command=[sys.executable, str(tmp_path / "launcher.py"), str(tmp_path / "ranks.py"), str(tmp_path / "store")]
        )
        await trainer.start()
        losses = []
        for step in range(1, 5):
            report = await trainer.train(order(step))
            losses.append(report.loss)
            assert report.samples == 5 * 64
            trainer.vector += trainer.delta
        assert losses[-1] < losses[0]
        await trainer.stop()
        await until(lambda: (world.state_dir / "trainer.log").read_text().count("rank") == 2, 5)

    world.run(scenario)
    rows = [
        row.split(maxsplit=4) for row in (world.state_dir / "trainer.log").read_text().splitlines() if "rank" in row
    ]
    assert sorted(row[1] for row in rows) == ["0", "1"]
    assert rows[0][2:] == rows[1][2:]
    assert rows[0][3] == str(4 * 5 * 64)
