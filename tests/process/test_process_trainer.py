"""The trainer as a real process: start, orders, crash, hang, stop, and a daemon that is killed or stopped."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from p2pnode.training.layout import Layout
from p2pnode.training.supervisor import process
from p2pnode.training.supervisor.process_trainer import ProcessTrainer
from p2pnode.training.trainer_link import shared_memory
from p2pnode.training.trainer_link.interface import StepOrder, TrainerFailed
from p2pnode.training.trainer_link.messages import StepAnswer
from tests.harness.project.repository import ROOT
from tests.harness.runner.long_run import more
from tests.harness.runner.stories import played_by
from tests.process.harness.forked_python import with_torch
from tests.process.harness.trainer_world import World, add, descriptors, is_running, until, wait_until


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(ROOT)  # Where `tests.harness.trainers.tasks` is found.
    return World(tmp_path / "state")


def order(step: int, local_steps: int = 2) -> StepOrder:
    return StepOrder(step, local_steps, 1.0, True)


@pytest.mark.parametrize("uvloop", [False, True])
def test_a_trainer_trains_evaluates_saves_describes_and_stops(world: World, uvloop: bool) -> None:
    """The whole way on both loops; stopping leaves no process and no socket."""
    world.starts_python = not uvloop

    async def scenario(world: World) -> None:
        trainer = world.trainer("Line")
        hello = await trainer.start()
        assert isinstance(hello.layout, Layout)
        assert (hello.task, hello.task_version) == ("tests.harness.trainers.tasks:Line", "1")
        assert trainer.vector.shape == trainer.delta.shape == (hello.layout.total,)
        assert trainer.vector.any()
        before = await trainer.evaluate(0)
        for step in range(1, 31):
            report = await trainer.train(order(step, 5))
            await add(trainer, step)
        after = await trainer.evaluate(30)
        assert before is not None
        assert after is not None
        assert after.metrics["error"] < 0.5 * before.metrics["error"]
        assert (report.step, report.optimizer_steps, report.samples) == (30, 5, 40)
        await (await trainer.save(str(world.state_dir / "checkpoint" / "trainer")))
        described = await trainer.describe(str(world.state_dir / "model"), wait=True)
        assert {source.name for source in described.tensors} == {entry.name for entry in hello.layout.entries}
        assert described.layout_digest == hello.layout.digest()
        assert trainer.take_measured() == []
        await trainer.stop()
        await trainer.stop()
        assert not is_running(hello.pid)

    world.run(scenario, uvloop=uvloop)
    assert world.states == ["starting", "running", "stopped"]
    assert not (world.state_dir / "trainer").exists()


async def train_beside(trainer: ProcessTrainer, steps: range) -> None:
    """Train steps while the delta of the one before is exchanged: its value enters late in the next step."""
    adding: asyncio.Task[None] | None = None
    for step in steps:
        report = await trainer.train(order(step, 5))
        if report.has_delta:
            if adding is not None:
                await adding  # its end is why there is a delta
            adding = asyncio.create_task(_add_late(trainer, step))
    if adding is not None:
        await adding
    if not report.has_delta:
        await trainer.train(order(steps[-1], 0))
        await add(trainer, steps[-1])


async def _add_late(trainer: ProcessTrainer, step: int) -> None:
    await asyncio.sleep(0.01)
    await add(trainer, step)


def test_one_node_equals_the_bare_loop(world: World) -> None:
    """200 optimiser steps through the process, plain sum, agree to 1e-6 with the bare torch loop. In the second half of
    them values enter while the next step is trained."""

    from p2pnode.training.trainer.state.snapshot import seed_all
    from p2pnode.training.trainer_link.messages import derive_node_seed
    from tests.harness.trainers import tasks

    async def scenario(world: World) -> Any:
        trainer = world.trainer("Adaptive", seed=3)
        await trainer.start()
        for step in range(1, 21):
            await trainer.train(order(step, 5))
            await add(trainer, step)
        await train_beside(trainer, range(21, 41))
        return trainer.vector.copy()

    got = world.run(scenario)

    node_seed = derive_node_seed(3, b"n" * 20)
    seed_all(3)
    task = tasks.Adaptive({}, data_dir="", seed=3, node_seed=node_seed, device="cpu")
    spec = task.build()
    seed_all(node_seed)
    batches = iter(task.batches())
    for _ in range(200):
        spec.optimizer.zero_grad()
        task.loss(spec.model, next(batches)).backward()
        spec.optimizer.step()
        assert spec.scheduler is not None
        spec.scheduler.step()
    bare = np.concatenate([value.detach().numpy().ravel() for _, value in sorted(spec.model.named_parameters())])
    np.testing.assert_allclose(got, bare, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", r"loss\(\) of the task .* raised RuntimeError: out of memory"),
        ("signal", "signal SIGSEGV"),
        *more(("exit", "exit code 17: the driver has gone")),
    ],
)
def test_a_crash_is_reported_and_the_vector_survives_it(world: World, how: str, reason: str) -> None:
    """However the process ends, the order fails with a sentence, another start takes the same buffers, and training
    goes on from the vector and the saved state."""

    async def scenario(world: World) -> None:
        trainer = world.trainer("Dying", options={"dies_at": 7, "how": how})
        first = await trainer.start()
        vector, delta = trainer.vector, trainer.delta
        await trainer.train(order(1))
        vector += delta
        await (await trainer.save(str(world.state_dir / "saved")))
        await trainer.train(order(2))
        vector += delta
        kept = vector.copy()
        with pytest.raises(TrainerFailed, match=reason) as failure:
            await trainer.train(order(3, 10))
        assert not failure.value.fatal
        assert trainer.state == "crashed"
        with pytest.raises(TrainerFailed, match=reason):
            await trainer.evaluate(3)
        second = await trainer.start(str(world.state_dir / "saved"))
        assert second.pid != first.pid
        assert second.layout == first.layout
        assert trainer.vector is vector
        assert np.array_equal(vector, kept)
        report = await trainer.train(order(3))
        assert report.step == 3
        assert delta.any()

    world.run(scenario)
    # On a loaded machine it may be silent for so long that it counts as hung, until it goes on.
    states = [state for state, _ in itertools.groupby(state for state in world.states if state != "hung")]
    assert states == ["starting", "running", "crashed", "starting", "running", "stopped"]
    if how == "raise":
        assert "RuntimeError: out of memory" in (world.state_dir / "trainer.log").read_text()


@pytest.mark.parametrize("turns_before", [0, 1], ids=["in its first turn", "later"])
def test_a_stopped_trainer_is_hung_and_then_moves_again(world: World, turns_before: int) -> None:
    """Silence makes it hung within `hang_s`, in its first turn because it does not work; a message makes it running,
    and nothing is lost."""

    async def scenario(world: World) -> None:
        trainer = world.trainer("Slow", options={"seconds": 0.05}, hang_s=1.0)
        hello = await trainer.start()
        for step in range(turns_before):
            await trainer.train(order(step + 1, 1))
        training = asyncio.create_task(trainer.train(order(turns_before + 1, 60)))  # as long as a late test needs
        await until(lambda: bool(trainer.state == "running") and not training.done())
        await asyncio.sleep(0.2)  # Into the order, so that it has spoken.
        os.kill(hello.pid, signal.SIGSTOP)
        await until(lambda: trainer.state == "hung")
        os.kill(hello.pid, signal.SIGCONT)
        await until(lambda: trainer.state == "running")
        assert (await training).optimizer_steps == 60

    world.run(scenario)
    # A loaded machine may make it silent at other moments too.
    assert [*dict.fromkeys(world.states)] == ["starting", "running", "hung", "stopped"]
    assert world.states[-2:] == ["running", "stopped"]
    assert world.log.fields("trainer_hung")[0]["silent_s"] >= 1.0


def test_a_trainer_idle_thirty_times_as_long_is_killed(world: World) -> None:
    """It fails in a way that another start may mend."""

    async def scenario(world: World) -> float:
        trainer = world.trainer("Slow", options={"seconds": 0.02}, hang_s=0.1)
        hello = await trainer.start()
        await trainer.train(order(1))
        os.kill(hello.pid, signal.SIGSTOP)
        began = time.monotonic()
        words = r"was silent for \d+ s and used no processor time, so it was killed"
        with pytest.raises(TrainerFailed, match=words) as failure:
            await trainer.train(order(2))
        assert not failure.value.fatal
        assert "swarm.busy" in failure.value.hint
        assert not is_running(hello.pid)
        assert trainer.state == "crashed"
        return time.monotonic() - began

    assert world.run(scenario) > 2.9


def test_a_long_evaluation_is_not_taken_for_a_hang(world: World) -> None:
    """Each pass through the model is a sign of life."""

    async def scenario(world: World) -> None:
        trainer = world.trainer("Slow", options={"seconds": 0.3}, hang_s=2.5)
        await trainer.start()
        evaluation = await trainer.evaluate(1)
        assert evaluation is not None

    world.run(scenario)
    assert "hung" not in world.states


@played_by("world.run")
async def test_a_trainer_that_hangs_between_its_turns_is_killed_while_values_are_to_enter(world: World) -> None:
    """Under bsp no order is under way then, and the next one waits until they have entered."""
    trainer = world.trainer("Slow", options={"seconds": 0.02}, hang_s=0.1)
    hello = await trainer.start()
    await trainer.train(order(1, 1))
    trainer.encoded()
    os.kill(hello.pid, signal.SIGSTOP)
    async with asyncio.timeout(60):
        await trainer.arrived(1)
    with pytest.raises(TrainerFailed, match="so it was killed"):
        await trainer.train(order(2, 1))


@played_by("world.run")
async def test_a_message_that_cannot_be_handled_ends_the_trainer_with_a_reason(world: World) -> None:
    """Nobody would read its socket any more: the order under way fails, and the process may be started again."""

    def unforeseen(_number: int) -> None:
        raise KeyError("a bug")

    trainer = world.trainer("Plain")
    trainer.on_step(unforeseen)
    hello = await trainer.start()
    async with asyncio.timeout(60):
        with pytest.raises(TrainerFailed, match="could not handle a message: KeyError") as failure:
            await trainer.train(StepOrder(1, 2, 1.0, True, asks=True))
    assert not failure.value.fatal
    assert not is_running(hello.pid)
    assert [fields["service"] for fields in world.log.fields("service_failed")] == ["trainer-link"]


@played_by("world.run")
async def test_requests_for_steps_reach_their_handler_and_their_answers_the_trainer(world: World) -> None:
    """As one of several of a node: each answer but the last is an optimiser step."""
    trainer, wanted = world.trainer("Plain"), list[int]()

    def answer(number: int) -> None:
        wanted.append(number)
        trainer.answer_step(number, StepAnswer.LOCAL if number <= 3 else StepAnswer.DISTRIBUTED)

    trainer.on_step(answer)
    await trainer.start()
    report = await trainer.train(StepOrder(1, 9, 1.0, True, asks=True))
    assert (wanted, report.optimizer_steps) == ([1, 2, 3, 4], 3)


@played_by("world.run")
async def test_a_hung_trainer_is_stopped_in_time(world: World) -> None:
    """A process that hears nothing is killed: nobody waits for it to end by itself."""
    trainer = world.trainer("Plain")
    hello = await trainer.start()
    os.kill(hello.pid, signal.SIGSTOP)
    await trainer.stop()
    assert not is_running(hello.pid)


def test_a_cancelled_order_is_left_and_the_next_one_has_its_own_answer(world: World) -> None:
    """A node that leaves saves at once, though the order under way was a long one."""

    async def scenario(world: World) -> None:
        trainer = world.trainer("Slow", options={"seconds": 0.02})
        await trainer.start()
        training = asyncio.create_task(trainer.train(order(1, 10_000)))
        await asyncio.sleep(0.3)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
        async with asyncio.timeout(60):
            await (await trainer.save(str(world.state_dir / "saved")))
            report = await trainer.train(order(2))
        assert (report.step, report.optimizer_steps) == (2, 2)

    world.run(scenario)
    assert (world.state_dir / "saved").exists()


@played_by("world.run")
async def test_a_stop_ends_an_order_under_way(world: World) -> None:
    """The caller that waits for the order gets an error, and nothing waits without end."""
    trainer = world.trainer("Slow", options={"seconds": 0.02})
    await trainer.start()
    training = asyncio.create_task(trainer.train(order(1, 10_000)))
    await asyncio.sleep(0.1)
    await trainer.stop()
    with pytest.raises(TrainerFailed, match="was stopped"):
        await training
    with pytest.raises(TrainerFailed, match="not running"):
        await trainer.train(order(1))


@played_by("world.run")
async def test_a_file_that_cannot_be_written_fails_the_order_and_not_the_trainer(world: World) -> None:
    """The message names the file, and the trainer continues."""
    trainer = world.trainer("Plain")
    await trainer.start()
    (world.state_dir / "file").write_text("in the way")
    with pytest.raises(TrainerFailed, match=r"file/model\.pt could not be written"):
        await (await trainer.save(str(world.state_dir / "file" / "model.pt")))
    assert trainer.state == "running"
    assert (await trainer.train(order(1))).step == 1


def test_a_warning_of_the_trainer_reaches_the_log(world: World) -> None:
    """A loss that is not finite is an event of the daemon's log."""

    async def scenario(world: World) -> None:
        trainer = world.trainer("Infinite")
        await trainer.start()
        await trainer.train(order(1))

    world.run(scenario)
    assert world.log.fields("trainer_warned")[0]["about"] == "loss_not_finite"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"task": "no_such_module:Task"}, "does not import"),
        ({"task": "tests.harness.trainers.tasks:Frozen"}, "no trainable parameter"),
        ({"task": "tests.harness.trainers.tasks:DiesAtStart"}, "exit code 5: library version mismatch"),
        ({"task": "text", "data_dir": "/nowhere/book.txt"}, "finds no file /nowhere/book.txt"),
    ],
)
def test_a_start_that_must_fail_again_is_fatal(world: World, settings: dict[str, Any], reason: str) -> None:
    """One sentence and a hint; no process and no socket stays behind."""
    with_torch()  # the server of the forks stays, and has a descriptor here
    before = descriptors()

    async def scenario(world: World) -> None:
        with pytest.raises(TrainerFailed, match=reason) as failure:
            await world.trainer(**settings).start()
        assert failure.value.fatal
        assert failure.value.hint
        assert "\n" not in failure.value.reason

    world.run(scenario)
    assert world.states == ["starting", "crashed", "stopped"]
    assert not (world.state_dir / "trainer").exists()
    assert descriptors() == before


@pytest.mark.parametrize(
    ("kind", "reason", "fatal"),
    [
        ("BuildsOnce", "out of memory", False),
        ("Growing", "another model than before", True),
        ("Requantised", "the tensor codes, which is not exchanged", True),
        ("LosesItsGpu", "the restarted trainer is on cpu, and the one before was on cuda:0", False),
    ],
)
@played_by("world.run")
async def test_a_restart_that_fails(world: World, *, tmp_path: Path, kind: str, reason: str, fatal: bool) -> None:
    """A fault on a restart may pass; a model that has changed, or its quantised part, cannot use the old vector."""
    trainer = world.trainer(kind, options={"mark": str(tmp_path / "mark")})
    await trainer.start()
    await trainer.stop()
    with pytest.raises(TrainerFailed, match=reason) as failure:
        await trainer.start()
    assert failure.value.fatal is fatal


@played_by("world.run")
async def test_a_driver_that_helps_nobody_is_told_of(world: World) -> None:
    """Slow copies in the log, and a GPU that torch does not see in /status too."""
    trainer = world.trainer("OnABadDriver")
    await trainer.start()
    await trainer.train(order(1))
    said = {fields["about"]: fields["message"] for fields in world.log.fields("trainer_warned")}
    assert said["copies_slow"].startswith("the driver cannot register 1 MB: values are copied to the GPU")
    assert said["gpu_not_used"] == "the GPU of this machine is not used"
    assert trainer.findings == [("the GPU of this machine is not used", "see nvidia-smi")]


@played_by("world.run")
async def test_a_start_can_be_cancelled(world: World) -> None:
    """A node that leaves while its trainer starts leaves no process behind."""
    trainer = world.trainer("Plain")
    starting = asyncio.create_task(trainer.start())
    async with asyncio.timeout(60):
        # A start on a fork is over within milliseconds: look at every turn of the loop.
        while not (world.state_dir / "trainer" / "link").exists():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert trainer.state == "stopped"
    assert not (world.state_dir / "trainer").exists()


@played_by("world.run")
async def test_a_process_that_has_just_started_is_ended_where_its_start_is_cancelled(
    world: World, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else knows of it, so it would run for ever."""
    started: list[int] = []

    async def never(pid: int, _nice: int) -> None:
        started.append(pid)
        await asyncio.Event().wait()

    monkeypatch.setattr(process, "make_nicer", never)
    starting = asyncio.create_task(world.trainer("Plain").start())
    await until(lambda: bool(started))
    assert is_running(started[0])
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not is_running(started[0])


@played_by("world.run")
async def test_too_little_memory_is_reported(world: World, *, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is trained."""
    monkeypatch.setattr(shared_memory, "available_memory_bytes", lambda: 100)
    with pytest.raises(TrainerFailed, match=r"takes 2 × .* of memory, and .* are free") as failure:
        await world.trainer("Plain").start()
    assert failure.value.fatal


def test_a_long_state_directory_has_its_socket_elsewhere(world: World) -> None:
    """The path of a Unix socket is bounded; a private temporary folder takes its place and is removed."""
    world.state_dir = world.state_dir / ("deep" * 10) / ("deeper" * 10)

    async def scenario(world: World) -> None:
        await world.trainer("Plain").start()

    world.run(scenario)
    assert list(world.state_dir.iterdir()) == []


def test_what_a_trainer_prints_is_kept_and_bounded(world: World) -> None:
    """Two files of a megabyte at most; the last lines are in the failure."""
    text = "for n in range(60000): print('line', n, 'x' * 40)\nraise SystemExit(9)"

    async def scenario(world: World) -> None:
        with pytest.raises(TrainerFailed, match="exit code 9: line 59999") as failure:
            await world.script(text).start()
        assert "line 59990" in failure.value.hint

    world.run(scenario)
    sizes = [path.stat().st_size for path in sorted(world.state_dir.glob("trainer.log*"))]
    assert len(sizes) == 2
    assert all(size <= 1 << 20 for size in sizes)


def start_daemon(folder: Path, seconds: float) -> tuple[subprocess.Popen[str], int]:
    daemon = subprocess.Popen(
        [sys.executable, "-m", "tests.process.harness.trainer_daemon", str(folder), str(seconds)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert daemon.stdout is not None
    return daemon, int(daemon.stdout.readline().split()[1])


@pytest.mark.parametrize("seconds", [30.0, *more(0.01)])
def test_a_trainer_ends_with_its_daemon(tmp_path: Path, seconds: float) -> None:
    """After SIGKILL of the daemon the trainer ends within seconds, even during a long optimiser step."""
    daemon, pid = start_daemon(tmp_path, seconds)
    try:
        daemon.kill()
        daemon.wait()

        assert wait_until(lambda: not is_running(pid), 60)
    finally:
        daemon.kill()
        daemon.communicate()


def test_a_stopped_daemon_keeps_its_trainer(tmp_path: Path) -> None:
    """After SIGSTOP and SIGCONT of the daemon the same trainer continues and does not count as hung."""
    daemon, pid = start_daemon(tmp_path, 0.01)
    try:
        assert daemon.stdout is not None
        daemon.stdout.readline()
        daemon.send_signal(signal.SIGSTOP)
        assert not wait_until(lambda: not is_running(pid), 1.5)
        daemon.send_signal(signal.SIGCONT)
        rows = [daemon.stdout.readline().split() for _ in range(30)]

        assert is_running(pid)
        assert {row[2] for row in rows} == {"running"}
    finally:
        daemon.kill()
        daemon.communicate()
    assert wait_until(lambda: not is_running(pid), 60)
