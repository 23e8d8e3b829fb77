"""A tracker that works, fails, hangs and comes back, in virtual time; and the real thread once."""

from __future__ import annotations

import asyncio
import csv
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from p2pnode.config.tracker import Tracker
from p2pnode.overlay.system import SystemClock
from p2pnode.status.findings import tracker_findings
from p2pnode.tracking import service
from p2pnode.tracking.service import PATIENCE_S, RETRY_S, START_PATIENCE_S, StepFeed, Tracking, Writing
from p2pnode.tracking.writers import Record
from p2pnode.training.progress import STEPS_KEPT, Progress, StepRow
from tests.harness.environment.simulated import ListLog, NoLog, VirtualClock
from tests.harness.environment.virtual_loop import run as run_virtual
from tests.harness.runner.stories import run_by

WRITING = Writing(Tracker("csv", "steps.csv"), Path("/state"), "digits", "a1b2")


class FakeWriter:
    """Keeps what it gets, unless it `fails`."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.fails: Exception | None = None
        self.closed = False

    def write(self, record: Record) -> None:
        if self.fails is not None:
            raise self.fails
        self.records.append(record)

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        self.closed = True


class World:
    """A node's progress, and a tracker whose writers are `writers`; an open beyond `opens` fails. While `free` is
    cleared the thread hangs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, opens: int = 9) -> None:
        self.progress = Progress()
        self.log = ListLog([])
        self.writers: list[FakeWriter] = []
        self.free = asyncio.Event()
        self.free.set()
        self._opens = opens
        self._one_at_a_time = asyncio.Lock()
        monkeypatch.setattr(service, "open_writer", self._open)
        self.tracking = Tracking(WRITING, self.progress, clock=VirtualClock(), log=self.log, in_thread=self._in_thread)
        self.task = asyncio.create_task(self.tracking.run())

    async def _in_thread(self, function: Callable[[], None]) -> None:
        async with self._one_at_a_time:
            await self.free.wait()
            function()

    def _open(self, *_: Any) -> FakeWriter:
        if len(self.writers) >= self._opens:
            raise FileNotFoundError(2, "no such folder")
        self.writers.append(FakeWriter())
        return self.writers[-1]

    async def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.progress.step += 1
            self.progress.steps.append({"step": self.progress.step, "loss": 1.0})
            await asyncio.sleep(1.0)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.tracking.close()

    def events(self) -> list[str]:
        return [record.event for record in self.log.records if record.event.startswith("tracker")]


def virtual(test: Coroutine[Any, Any, None]) -> None:
    run_virtual(test)


@run_by(virtual)
async def test_every_step_is_written_also_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are written within a second; `close` writes what came after the last look."""
    world = World(monkeypatch)
    await world.step(5)
    world.progress.steps.append({"step": 6})
    await world.stop()
    assert [record.step for record in world.writers[0].records] == [1, 2, 3, 4, 5, 6]
    assert world.writers[0].closed
    assert (world.events(), world.tracking.problem, world.tracking.lost) == ([], "", 0)


@run_by(virtual)
async def test_a_writer_that_fails_is_named_and_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reason is a warning and a finding until the next writer has written a record; gaps are counted."""
    world = World(monkeypatch)
    await world.step(3)
    world.writers[0].fails = OSError(28, "No space left on device")
    await world.step(10)
    [finding] = tracker_findings(world.tracking.name, world.tracking.problem, world.tracking.lost)
    assert "csv:steps.csv fails: [Errno 28] No space left on device" in finding.what
    await asyncio.sleep(RETRY_S)
    await world.step(2)
    assert world.writers[0].closed
    assert [record.step for record in world.writers[1].records] == [14, 15]
    assert world.events() == ["tracker_failed", "tracker_writes_again"]
    assert tracker_findings(world.tracking.name, world.tracking.problem, 0) == []
    assert world.tracking.lost == 10
    await world.stop()


@run_by(virtual)
async def test_a_library_may_raise_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kind of the error is named with its text."""
    world = World(monkeypatch)
    await world.step()
    world.writers[0].fails = ZeroDivisionError("by\nzero")
    await world.step()
    assert world.tracking.problem == "ZeroDivisionError: by zero"
    await world.stop()


@run_by(virtual)
async def test_a_failure_that_repeats_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that cannot be opened is tried every minute, and logged when the reason changes."""
    world = World(monkeypatch, opens=0)
    await asyncio.sleep(10 * RETRY_S)
    assert world.events() == ["tracker_failed"]
    assert "no such folder" in world.tracking.problem
    await world.stop()


@pytest.mark.parametrize(("written", "patience_s"), [(0, START_PATIENCE_S), (3, PATIENCE_S)])
@run_by(virtual)
async def test_a_thread_that_hangs_is_a_problem_until_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, written: int, patience_s: float
) -> None:
    """Silence is a problem after the patience, longer while the library may still be loading. Steps of the time
    between are lost and counted. An idle node is none."""
    world = World(monkeypatch)
    if written:
        await asyncio.sleep(10 * START_PATIENCE_S)
        await world.step(written)
    world.free.clear()
    await world.step()
    await asyncio.sleep(patience_s - 2.0)
    assert world.events() == []
    await asyncio.sleep(4.0)
    assert "written nothing for" in world.tracking.problem
    await world.step(5)
    world.free.set()
    await asyncio.sleep(1.0)
    await world.step(2)
    assert world.events() == ["tracker_failed", "tracker_writes_again"]
    steps = [record.step for record in world.writers[0].records]
    assert steps == ([1, 2, 3, 4, 10, 11] if written else [7, 8])
    assert world.tracking.lost == (5 if written else 6)
    await world.stop()


@run_by(virtual)
async def test_a_thread_that_hangs_keeps_no_node_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` gives up after its time."""
    world = World(monkeypatch)
    await world.step()
    world.free.clear()
    await world.step()
    async with asyncio.timeout(service.CLOSE_S + 1.0):
        await world.stop()


def test_the_real_thread_writes_a_table(tmp_path: Path) -> None:
    """Also what is left at the end."""

    async def course() -> None:
        progress = Progress()
        writing = Writing(Tracker("csv", "steps.csv"), tmp_path, "digits", "a1b2")
        tracking = Tracking(writing, progress, clock=SystemClock(), log=NoLog())
        task = asyncio.create_task(tracking.run())
        while not (tmp_path / "steps.csv").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        progress.steps.extend([{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await tracking.close()

    asyncio.run(course())

    with (tmp_path / "steps.csv").open(newline="", encoding="utf-8") as file:
        assert [(row["step"], row["loss"]) for row in csv.DictReader(file)] == [("1", "0.5"), ("2", "0.25")]


def test_the_real_thread_says_why_it_cannot_write(tmp_path: Path) -> None:
    """A place that cannot be written is the reason in the log, in the system's words."""
    (tmp_path / "file").write_text("")

    async def course() -> str:
        log = ListLog([])
        writing = Writing(Tracker("csv", "file/steps.csv"), tmp_path, "digits", "a1b2")
        tracking = Tracking(writing, Progress(), clock=SystemClock(), log=log)
        task = asyncio.create_task(tracking.run())
        while not log.of("tracker_failed"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await tracking.close()
        return tracking.problem

    assert "exists" in asyncio.run(course())


def row(step: int) -> StepRow:
    return {"step": step, "loss": 1.0 / step, "samples": 32, "refused": {"stale": 1}, "merged": {"ab": step}}


def test_each_step_is_taken_once() -> None:
    """A second call returns what came since the first; tables of a row are no numbers of it."""
    progress, feed = Progress(), StepFeed()
    progress.steps.extend([row(1), row(2)])

    first = feed.take(progress, 5.0)
    progress.steps.append(row(3))

    assert first == [Record(1, 5.0, {"loss": 1.0, "samples": 32}), Record(2, 5.0, {"loss": 0.5, "samples": 32})]
    assert [record.step for record in feed.take(progress, 6.0)] == [3]
    assert feed.take(progress, 7.0) == []


def test_equal_rows_are_different_steps() -> None:
    """A trainer that went back repeats a step with the same numbers: both are recorded."""
    progress, feed = Progress(), StepFeed()
    progress.steps.append(row(1))
    feed.take(progress, 1.0)
    progress.steps.append(row(1))

    assert len(feed.take(progress, 2.0)) == 1


def test_steps_that_left_the_memory_are_not_awaited() -> None:
    """When more steps passed than the node keeps, those that it keeps are taken."""
    progress, feed = Progress(), StepFeed()
    progress.steps.append(row(1))
    feed.take(progress, 1.0)
    progress.steps.extend(row(step) for step in range(2, 2 * STEPS_KEPT))

    assert [record.step for record in feed.take(progress, 2.0)] == list(range(STEPS_KEPT, 2 * STEPS_KEPT))


def test_metrics_of_training_go_with_the_newest_step_and_evaluations_with_their_own() -> None:
    """An evaluation has the step of the model that was evaluated, and is recorded once."""
    progress, feed = Progress(), StepFeed()
    progress.steps.extend([row(4), row(5)])
    progress.training_metrics = {"accuracy": 0.7}
    progress.evaluated_metrics, progress.evaluated_step = {"accuracy": 0.6}, 4

    fourth, fifth, evaluation = feed.take(progress, 1.0, {"peers": 3})
    progress.steps.append(row(6))

    assert "train/accuracy" not in fourth.values
    assert (fifth.values["train/accuracy"], fifth.values["peers"]) == (0.7, 3)
    assert evaluation == Record(4, 1.0, {"eval/accuracy": 0.6})
    assert [record.step for record in feed.take(progress, 2.0)] == [6]
