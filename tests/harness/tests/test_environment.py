"""The simulated environment (clock, entropy, disk, executor, log) and the stub trainer."""

from __future__ import annotations

import asyncio
import errno

import numpy as np
import pytest

from p2pnode.overlay.environment import Clock, Disk, Entropy, Executor, Log
from p2pnode.training.trainer_link.interface import StepOrder, Trainer, TrainerFailed
from tests.harness.environment.simulated import InlineExecutor, ListLog, MemoryDisk, Record, SeededEntropy, VirtualClock
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.harness.trainers.stub_trainer import UNIT, StubTrainer, delta_of, exponential, initial_vector


def order(step: int) -> StepOrder:
    return StepOrder(step=step, local_steps=2, workers=1.0, is_first=True)


@run_by(run)
async def test_clock_follows_the_loop() -> None:
    """Monotonic time is the loop's; wall time goes with it, shifted by its skew."""
    clock = VirtualClock()
    interface: Clock = clock
    monotonic, wall = interface.monotonic(), interface.wall()
    await asyncio.sleep(5)
    assert interface.monotonic() - monotonic == 5
    clock.skew_s = -60
    assert interface.wall() - wall == pytest.approx(-55)


def test_entropy_repeats() -> None:
    """The same seed gives the same tokens and draws; tokens do not disturb the draws; seeds differ."""
    one, same, other = SeededEntropy("7/a"), SeededEntropy("7/a"), SeededEntropy("7/b")
    interface: Entropy = one
    assert interface.token(16) == same.token(16) != other.token(16)
    same.token(5)
    assert one.random.random() == same.random.random() != other.random.random()


def test_memory_disk() -> None:
    """It reads what was written, lists by folder, and forgets what was removed."""
    disk = MemoryDisk()
    interface: Disk = disk
    interface.write("a/x", b"1", private=True)
    interface.write("ab", b"2")
    assert (interface.read("a/x"), interface.read("nothing")) == (b"1", None)
    assert (interface.names(), interface.names("a")) == (["a/x", "ab"], ["a/x"])
    assert disk.private == {"a/x": True, "ab": False}
    interface.remove("ab")
    interface.remove("ab")
    assert interface.names() == ["a/x"]


def test_memory_disk_faults() -> None:
    """A full disk keeps the old content, a torn file is short, an unreadable one raises."""
    disk = MemoryDisk()
    disk.write("x", b"old content")
    disk.full = True
    with pytest.raises(OSError) as caught:
        disk.write("x", b"new")
    assert caught.value.errno == errno.ENOSPC
    assert disk.read("x") == b"old content"
    disk.tear("x")
    assert disk.read("x") == b"old c"
    disk.tear("x", 1)
    assert disk.read("x") == b"o"
    disk.unreadable.add("x")
    with pytest.raises(PermissionError):
        disk.read("x")


@run_by(run)
async def test_inline_executor_lets_others_run() -> None:
    """A function off the loop returns its result or raises, and others run before it does."""
    executor: Executor = InlineExecutor()
    seen: list[str] = []
    asyncio.get_running_loop().call_soon(seen.append, "other")
    assert await executor.run(lambda a, b: [*seen, a, b], 1, b=2) == ["other", 1, 2]
    with pytest.raises(ZeroDivisionError):
        await executor.run(divmod, 1, 0)


def test_list_log() -> None:
    """Events of all nodes land in one list with their virtual time; equal histories have equal digests."""

    async def main() -> tuple[list[Record], str]:
        records: list[Record] = []
        one, two = ListLog(records, "one"), ListLog(records, "two")
        log: Log = one
        log.info("up", step=1)
        await asyncio.sleep(2.5)
        two.warning("slow", who="one")
        return records, one.digest()

    records, digest = run(main())
    assert records == [
        Record(0.0, "one", "info", "up", {"step": 1}),
        Record(2.5, "two", "warning", "slow", {"who": "one"}),
    ]
    assert run(main())[1] == digest


@run_by(run, strict=True)
async def test_stub_trainer_steps() -> None:
    """A step takes its virtual time and yields the delta of its name and number, exact in bfloat16 and in sums."""
    stub = StubTrainer("a", 100, seed=3, step_s=1.5)
    trainer: Trainer = stub
    hello = await trainer.start()
    assert hello.layout.total == 100
    assert np.array_equal(trainer.vector, initial_vector(3, 100))
    began = asyncio.get_running_loop().time()
    reports = []
    for step in (1, 2):
        reports.append(await trainer.train(order(step)))
        trainer.encoded()
        await trainer.arrived(step)
    assert asyncio.get_running_loop().time() - began == 3
    assert [report.samples for report in reports] == [64, 64]
    assert np.array_equal(trainer.delta, delta_of("a", 2, 100))
    assert np.array_equal(stub.expected(), delta_of("a", 1, 100) + delta_of("a", 2, 100))
    assert not np.any(trainer.delta.view(np.uint32) & 0xFFFF)
    evaluation = await trainer.evaluate(2)
    assert evaluation is not None
    assert evaluation.metrics["mean"] == pytest.approx(float(trainer.vector.mean()))


@run_by(run, strict=True)
async def test_stub_trainer_crash_and_restart() -> None:
    """A crash loses the step; after another start the same step can be trained, and the vector has survived."""
    states: list[str] = []
    trainer = StubTrainer("a", 10, on_state=states.append)
    await trainer.start()
    trainer.vector[:] = 7
    trainer.crash_next()
    with pytest.raises(TrainerFailed):
        await trainer.train(order(1))
    with pytest.raises(TrainerFailed):
        await trainer.train(order(1))
    await trainer.start("a file")
    await trainer.train(order(1))
    assert (trainer.trained, trainer.starts, trainer.restored) == ([1], 2, ["a file"])
    assert np.all(trainer.vector == 7)
    await trainer.stop()
    assert states == ["starting", "running", "crashed", "starting", "running", "stopped"]


@run_by(run, strict=True)
async def test_stub_trainer_hang() -> None:
    """A hanging trainer is `hung` after its limit, and finishes its step when it continues."""
    trainer = StubTrainer("a", 10, hang_s=10)
    await trainer.start()
    trainer.hang()
    step = asyncio.create_task(trainer.train(order(1)))
    await asyncio.sleep(5)
    assert trainer.state == "running"
    await asyncio.sleep(10)
    assert trainer.state == "hung"
    trainer.resume()
    await step
    assert (trainer.state, trainer.trained) == ("running", [1])


@run_by(run)
async def test_stub_trainer_refuses_to_start() -> None:
    """`fail_start` is what every start raises."""
    trainer = StubTrainer("a", 10)
    trainer.fail_start = TrainerFailed("the task does not import", fatal=True)
    with pytest.raises(TrainerFailed, match="import"):
        await trainer.start()
    assert trainer.state == "crashed"


def test_exponential_step_times() -> None:
    """Exponential step times have the asked mean and repeat with the seed."""

    async def main() -> float:
        trainer = StubTrainer("a", UNIT and 1, step_s=exponential(0.5))
        await trainer.start()
        trainer.waits = False
        return sum([(await trainer.train(order(step))).seconds for step in range(1, 401)])

    assert run(main()) == run(main())
    assert 150 < run(main()) < 250
