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

from p2pnode.training.trainer_link.interface import StepOrder, TrainerEnd, TrainerFailed, TrainerLeft
from tests.harness.project.repository import ROOT
from tests.harness.runner.stories import played_by
from tests.process.harness.forked_python import Forked, with_torch
from tests.process.harness.trainer_world import World, add, is_running, until

#: Half of a script's start is the import of torch's compiler, which its optimizer causes (`lazy_dynamo`).
NO_COMPILER = """
from p2pnode.training.trainer.lazy_dynamo import import_later
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
    world.starts_python = True

    async def scenario(world: World) -> np.ndarray:
        trainer = world.script(LOOP.removeprefix(NO_COMPILER))
        hello = await trainer.start()
        assert hello.task == "attached"
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
        assert await trainer.stop(60.0) == TrainerEnd()  # torch's own end takes long on a busy machine
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
            await add(trainer, step)
        return trainer.vector.copy()

    async def halves(world: World) -> np.ndarray:
        trainer = world.script(LOOP)
        await trainer.start()
        for step in range(1, 7):
            await trainer.train(order(step))
            await add(trainer, step)
            if step == 3:
                await (await trainer.save(str(world.state_dir / "saved")))
                await trainer.stop()
                await trainer.start(str(world.state_dir / "saved"))
        return trainer.vector.copy()

    expected = world.run(whole)
    other = World(tmp_path / "other")
    assert np.array_equal(other.run(halves), expected)
    assert "attached 4 2.0 True 15 960" in (other.state_dir / "trainer.log").read_text()


@played_by("world.run")
async def test_a_late_joiner_has_the_schedule_of_the_others(world: World) -> None:
    """The scheduler is moved to the swarm's position, and the swarm's weights replace the script's own."""
    trainer = world.script(LOOP)
    await trainer.start()
    trainer.vector[:] = 0.5
    report = await trainer.train(order(10))
    # cosine at 50 of 100 optimiser steps
    assert report.metrics["learning_rate"] == pytest.approx(0.005, rel=1e-4)


def test_a_script_that_returns_early_has_left(world: World) -> None:
    """Exit code 0 before the swarm is done is no failure: the node is to leave too."""

    async def scenario(world: World) -> None:
        trainer = world.script(BEGIN + "swarm = p2pnode.attach(model, optimizer)\ntrain_once(); swarm.step(loss=1.0)\n")
        await trainer.start()
        with pytest.raises(TrainerLeft, match="has returned before the run was over"):
            await trainer.train(order(1))
        assert trainer.state == "left"
        assert await trainer.finish("script", 60.0) == TrainerEnd()

    world.run(scenario)
    assert [name for level, name, _ in world.log.records if level in ("warning", "error")] == []


LEAVING = (
    LOOP.replace("while not swarm.done:", "while swarm.step_number < 3:")
    + """
train_once()
swarm.leave()
print("left", swarm.done, model[0].bias.tolist(), flush=True)
torch.save(model.state_dict(), sys.argv[0] + ".pt")
swarm.leave()
sys.exit(6)
"""
)


def test_a_script_can_let_its_node_leave(world: World) -> None:
    """`swarm.leave()`: the order under way ends as `TrainerLeft`, and the daemon can still have its state and its
    model. The script goes on with the swarm's weights until it ends by itself, with its own exit code."""

    async def scenario(world: World) -> np.ndarray:
        trainer = world.script(LEAVING)
        await trainer.start()
        for step in (1, 2):
            await trainer.train(order(step))
            await add(trainer, step)
        with pytest.raises(TrainerLeft, match=r"swarm\.leave\(\)"):
            await trainer.train(order(3))
        with pytest.raises(TrainerLeft):
            await trainer.train(order(3))
        await trainer.save(str(world.state_dir / "saved"))
        assert (await trainer.describe("")).tensors
        assert await trainer.finish("script", 30.0) == TrainerEnd(6)
        return trainer.vector[:8].copy()

    final = world.run(scenario)
    [row] = [row for row in (world.state_dir / "trainer.log").read_text().splitlines() if row.startswith("left True")]
    assert np.allclose(json.loads(row.removeprefix("left True")), final)
    assert (world.state_dir / "saved").exists()
    assert (world.state_dir / "users" / "train.py.pt").exists()


AFTER_DONE = (
    LOOP
    + """
import os, time
seconds, code = float(os.environ["AFTER_DONE_S"]), int(os.environ["AFTER_DONE_CODE"])
time.sleep(seconds)
torch.save(torch.zeros(5_000_000), sys.argv[0] + ".pt")
print("saved", flush=True)
sys.exit(code)
"""
)


@pytest.mark.parametrize(
    ("seconds", "code", "finish_s", "expected"),
    [
        # Longer than the two seconds, and SIGTERM's third, that a process had before `finish_s` was introduced.
        (3.5, 0, 60.0, TrainerEnd(0)),
        (0.0, 5, 60.0, TrainerEnd(5)),
        (60.0, 0, 0.5, TrainerEnd(-signal.SIGTERM, cut_short=True)),
    ],
    ids=["long", "own code", "cut short"],
)
def test_a_script_finishes_by_itself_after_the_run(
    world: World, monkeypatch: pytest.MonkeyPatch, seconds: float, code: int, finish_s: float, expected: TrainerEnd
) -> None:
    """What it does after `swarm.done`, an evaluation and a `torch.save` of 20 MB, completes within `finish_s`; its exit
    code is kept; one that takes longer is ended with a warning."""
    monkeypatch.setenv("AFTER_DONE_S", str(seconds))
    monkeypatch.setenv("AFTER_DONE_CODE", str(code))

    async def scenario(world: World) -> None:
        trainer = world.script(AFTER_DONE)
        await trainer.start()
        await trainer.train(order(1))
        assert await trainer.finish("max_steps", finish_s) == expected
        assert (trainer.state, await trainer.stop()) == ("stopped", expected)

    world.run(scenario)
    is_complete = "saved" in (world.state_dir / "trainer.log").read_text()
    assert is_complete is not expected.cut_short
    if is_complete:
        import torch

        assert len(torch.load(world.state_dir / "users" / "train.py.pt")) == 5_000_000
    assert bool(world.log.fields("script_cut_short")) is expected.cut_short


#: Quick turns, so that the pace is known, and among them passes of different kinds.
PASSES = (
    LOOP.replace('state["count"] += 1', "long_pass(swarm.step_number)")
    .replace("import sys", "import sys, time")
    .replace(
        "def train_once",
        """
def spin(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
def long_pass(step):
    if step == 1:
        spin(0.6)
    elif step == 4:
        time.sleep(1.5)
    elif step == 6:
        spin(0.5)
        time.sleep(1.0)
        spin(0.5)
    elif step == 8:
        with swarm.busy("validation"):
            with swarm.busy("plots"):
                pass
            time.sleep(3.3)
    elif step == 10:
        for _ in range(30):
            swarm.alive()
            time.sleep(0.05)
    elif step == 12:
        time.sleep(600)
def train_once""",
    )
)


#: The first step waits for something, and then compiles.
LATE_WORK = LOOP.replace("import sys", "import sys, time").replace(
    "    loss = train_once()",
    """
    if not state["count"]:
        time.sleep(2.5)
        end = time.process_time() + 2.0
        while time.process_time() < end:
            pass
    loss = train_once()""",
)


@played_by("world.run")
async def test_a_first_step_that_works_again_counts_again(world: World) -> None:
    """Idle for `hang_s` it is announced as stalled; while it computes, silent, it is not any more."""
    trainer = world.script(LATE_WORK, hang_s=1.0)
    await trainer.start()
    training = asyncio.create_task(trainer.train(order(1, 1)))
    await until(lambda: "hung" in world.states)
    await until(lambda: world.states[-1] == "running")
    began = time.monotonic()
    assert (await training).step == 1
    assert time.monotonic() - began > 0.3  # no message made it running


def test_work_between_two_steps_is_no_hang_and_a_hang_is_one(world: World) -> None:
    """With `hang_s = 0.1`: a silent pass of 15 times that and a computing one of 20 times that are stalled and go on; a
    first turn that compiles for six times that, and a declared pass, are not even stalled; what sleeps is killed. A
    declared pass is not in a step's time of training."""
    stalled: list[int] = []
    declared: list[str] = []

    async def scenario(world: World) -> None:
        trainer = world.script(PASSES, hang_s=0.1)

        def note(state: str) -> None:
            (world.states if trainer.busy is None else declared).append(state)

        trainer.on_state = note
        await trainer.start()
        for step in range(1, 12):
            world.states.clear()
            training = asyncio.create_task(trainer.train(order(step, 1)))
            if step == 8:
                await until(lambda: trainer.busy is not None and trainer.busy.what == "validation")
            report = await training
            assert report.step == step
            assert trainer.busy is None
            if step == 8:  # which rested for 3.3 s
                assert report.seconds < 3.0
            if "hung" in world.states:
                stalled.append(step)
        with pytest.raises(TrainerFailed, match="used no processor time") as failure:
            await trainer.train(order(12, 1))
        assert not failure.value.fatal

    world.run(scenario)
    # On a loaded machine any other turn may be silent for a tenth of a second.
    assert {4, 6} <= set(stalled)
    assert 1 not in stalled
    assert declared == []
    assert world.log.fields("trainer_hung")


@pytest.mark.parametrize(("step", "fatal"), [(1, True), (2, False)])
@played_by("world.run")
async def test_a_script_that_raises_is_a_crash(world: World, *, step: int, fatal: bool) -> None:
    """The last line of the traceback is in the sentence. Before its first completed turn another start would do the
    same; later it may not."""
    text = LOOP.replace("loss = train_once()", f"loss = train_once(); assert swarm.step_number < {step}")
    trainer = world.script(text)
    await trainer.start()
    for completed in range(1, step):
        await trainer.train(order(completed))
    with pytest.raises(TrainerFailed, match="exit code 1: AssertionError") as failure:
        await trainer.train(order(step))
    assert failure.value.fatal is fatal
    assert "AssertionError" in failure.value.hint


def test_a_saved_state_that_is_gone_is_not_fatal(world: World) -> None:
    """Its checkpoint has been replaced by newer ones without the trainer's state: the optimiser begins anew."""

    async def scenario(world: World) -> None:
        trainer = world.script(LOOP)
        await trainer.start(str(world.state_dir / "gone" / "trainer.state"))
        assert (await trainer.train(order(1))).step == 1

    world.run(scenario)
    [gone] = world.log.fields("trainer_state_gone")
    assert gone["path"].endswith("gone/trainer.state")


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
@played_by("world.run")
async def test_a_script_that_cannot_attach_is_fatal(world: World, *, text: str, reason: str) -> None:
    """Before there is a model, another start would do the same."""
    with pytest.raises(TrainerFailed) as failure:
        await world.script(text).start()
    assert reason in failure.value.reason + failure.value.hint
    assert failure.value.fatal


@played_by("world.run")
async def test_a_command_that_does_not_exist_is_named(world: World) -> None:
    """`p2pnode run -- pyhton train.py`."""
    with pytest.raises(TrainerFailed, match="could not be started: pyhton") as failure:
        await world.trainer(command=["pyhton", "train.py"]).start()
    assert failure.value.fatal


def test_attach_outside_of_a_node_says_how_to_start_the_script(tmp_path: Path) -> None:
    """Without the daemon's variable there is one sentence."""
    (tmp_path / "train.py").write_text(LOOP)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("P2PNODE_")}

    errors = tmp_path / "errors"
    with errors.open("wb") as stream:
        done = Forked(with_torch(), [str(tmp_path / "train.py")], env=environment, stderr=stream)
    assert done.wait(60.0) == 1
    assert "`p2pnode run -- python train.py`" in errors.read_text().splitlines()[-1]


def test_importing_p2pnode_does_not_import_torch(tmp_path: Path) -> None:
    """Accessing `p2pnode.attach` imports torch; importing `p2pnode` does not."""
    # A torch that is none: the real one takes two seconds.
    (tmp_path / "torch.py").write_text("raise ImportError('this is where torch is imported')")
    text = (
        "import sys, p2pnode; print(p2pnode.__version__, 'torch' in sys.modules, 'numpy' in sys.modules, flush=True); "
        "sys.path.insert(0, sys.argv[1]); p2pnode.attach"
    )

    command = [sys.executable, "-c", text, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)

    assert done.stdout.split() == ["0.1.0", "False", "False"]
    assert "this is where torch is imported" in done.stderr


@played_by("world.run")
async def test_a_cancelled_turn_of_a_script_is_left(world: World) -> None:
    """The script continues with the next turn, from the vector, without the cancelled steps."""
    trainer = world.script(LOOP.replace('state["count"] += 1', "import time; time.sleep(0.01)"))
    await trainer.start()
    training = asyncio.create_task(trainer.train(order(1, 10_000)))
    await asyncio.sleep(0.3)
    training.cancel()
    with pytest.raises(asyncio.CancelledError):
        await training
    async with asyncio.timeout(60):
        await (await trainer.save(str(world.state_dir / "saved")))
        assert (await trainer.train(order(2, 3))).optimizer_steps == 3


@pytest.mark.long
def test_a_script_ends_with_its_daemon(tmp_path: Path) -> None:
    """When the daemon is killed the script ends too."""
    (tmp_path / "train.py").write_text(LOOP)
    text = f"""
import asyncio, sys
from pathlib import Path
from tests.process.harness.trainer_world import World
from p2pnode.training.trainer_link.interface import StepOrder
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

    end_s = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not is_running(pid)


RANKS = (
    BEGIN
    + """
import os, time
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
    with swarm.shared_weights():
        shared = model[0].bias.tolist()
    swarm.step(samples=32, loss=loss)
# Rank 0 ends first, and its socket closes.
time.sleep(3.5 * rank)
# In one write: print makes two of line and end where nothing is buffered, and the other rank writes between them.
line = f"rank {rank} {swarm.step_number} {swarm.samples_seen} {model[0].bias.tolist()} {shared}\\n"
os.write(1, line.encode())
sys.exit(4 * rank)
"""
)

#: Forks instead of starting, because it has imported torch already.
LAUNCHER = """
import os, runpy, sys
program, store = sys.argv[1:]
for rank in (0, 1):
    if os.fork() == 0:
        sys.argv = [program, str(rank), store]
        runpy.run_path(program, run_name="__main__")
        sys.exit()
sys.exit(max(os.waitstatus_to_exitcode(os.wait()[1]) for _ in (0, 1)))
"""


def test_two_ranks_train_as_one_node(world: World, tmp_path: Path) -> None:
    """gloo, two processes: rank 0 reports, samples add up, and both end with the shared weights and by themselves: the
    node waits for the one that takes longer, and for the launcher's exit code. In the last turn a value enters that
    lacks the last delta: both see the shared weights without it until then."""
    (tmp_path / "ranks.py").write_text(RANKS)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    shared: list[float] = []

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
            assert report.has_delta is (step < 4)
            if step == 3:
                shared.extend(trainer.vector[:8].tolist())
            if report.has_delta:
                trainer.encoded()
                trainer.vector += trainer.delta
            if step < 3:
                await trainer.arrived(step)
        await trainer.arrived(3)
        assert (await trainer.train(StepOrder(4, 0, 1.0, True))).has_delta
        trainer.vector += trainer.delta
        assert losses[-1] < losses[0]
        assert await trainer.finish("max_steps", 60.0) == TrainerEnd(4)

    world.run(scenario)
    rows = [
        row.split(maxsplit=4) for row in (world.state_dir / "trainer.log").read_text().splitlines() if "rank" in row
    ]
    assert sorted(row[1] for row in rows) == ["0", "1"]
    assert rows[0][2:] == rows[1][2:]
    assert rows[0][3] == str(4 * 5 * 64)
    ended, seen = json.loads(f"[{rows[1][4].replace('] [', '], [')}]")
    np.testing.assert_allclose(seen, shared, atol=1e-6)
    assert not np.allclose(seen, ended, atol=1e-6)
