"""A tracker that works, fails, hangs and comes back, in virtual time; and the real process once."""

from __future__ import annotations

import asyncio
import csv
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from overlay.system import SystemClock
from p2pnode.config.tracker import Tracker
from p2pnode.status.tracker import tracker_findings
from p2pnode.tracking import service
from p2pnode.tracking.feed import Record
from p2pnode.tracking.service import (
    BUFFER_BYTES,
    PATIENCE_S,
    RETRY_S,
    START_PATIENCE_S,
    ProcessChannel,
    Tracking,
    Writing,
)
from tests.harness.environment.simulated import ListLog, NoLog, VirtualClock
from tests.harness.environment.virtual_loop import run as run_virtual
from training.progress import Progress

WRITING = Writing(Tracker("csv", "steps.csv"), Path("/state"), "digits", "a1b2")


class FakeChannel:
    """A process that confirms at once what it gets, unless it `hangs`."""

    def __init__(self) -> None:
        self.confirmed = 0
        self.hangs = False
        self.waiting = 0
        self.records: list[Record] = []
        self.closed = False
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def waiting_bytes(self) -> int:
        return self.waiting

    def send(self, line: bytes) -> None:
        self.records.append(Record.parse(line))
        if not self.hangs and not self.end.done():
            self.confirmed = len(self.records)

    async def ended(self) -> str:
        return await asyncio.shield(self.end)

    async def close(self, timeout_s: float) -> None:
        self.closed = True


class World:
    """A node's progress, and a tracker whose processes are `channels`; a start beyond `starts` fails."""

    def __init__(self, starts: int = 9) -> None:
        self.progress = Progress()
        self.log = ListLog([])
        self.channels: list[FakeChannel] = []
        self._starts = starts
        self.tracking = Tracking(WRITING, self.progress, clock=VirtualClock(), log=self.log, start=self._start)
        self.task = asyncio.create_task(self.tracking.run())

    async def _start(self, command: list[str]) -> FakeChannel:
        if len(self.channels) >= self._starts:
            raise FileNotFoundError(2, "no such program")
        self.channels.append(FakeChannel())
        return self.channels[-1]

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


def test_every_step_reaches_the_process_also_the_last() -> None:
    """Steps are sent within a second; `close` sends what came after the last look."""

    async def course() -> None:
        world = World()
        await world.step(5)
        world.progress.steps.append({"step": 6})
        await world.stop()
        assert [record.step for record in world.channels[0].records] == [1, 2, 3, 4, 5, 6]
        assert world.channels[0].closed
        assert (world.events(), world.tracking.problem, world.tracking.lost) == ([], "", 0)

    virtual(course())


def test_a_process_that_dies_is_named_and_started_again() -> None:
    """Its reason is a warning and a finding until the next process has confirmed a record; gaps are counted."""

    async def course() -> None:
        world = World()
        await world.step(3)
        world.channels[0].end.set_result("No space left on device")
        await world.step(10)
        [finding] = tracker_findings(world.tracking.name, world.tracking.problem, world.tracking.lost)
        assert "csv:steps.csv fails: No space left on device" in finding.what
        await asyncio.sleep(RETRY_S)
        await world.step(2)
        assert [record.step for record in world.channels[1].records] == [14, 15]
        assert world.events() == ["tracker_failed", "tracker_writes_again"]
        assert tracker_findings(world.tracking.name, world.tracking.problem, 0) == []
        assert world.tracking.lost == 10
        await world.stop()

    virtual(course())


def test_a_process_whose_pipes_cannot_be_read_is_started_again() -> None:
    """A library printed a line that is longer than a pipe's buffer: a failure as any other, and that process ends."""

    async def course() -> None:
        world = World()
        await world.step(3)
        world.channels[0].end.set_exception(ValueError("Separator is not found"))
        await asyncio.sleep(RETRY_S + 1.0)
        assert world.channels[0].closed
        assert len(world.channels) == 2
        assert world.log.of("tracker_failed")[0].fields["reason"] == "ValueError('Separator is not found')"
        await world.stop()

    virtual(course())


def test_a_failure_that_repeats_is_logged_once() -> None:
    """A program that cannot be started is tried every minute, and logged when the reason changes."""

    async def course() -> None:
        world = World(starts=0)
        await asyncio.sleep(10 * RETRY_S)
        assert world.events() == ["tracker_failed"]
        assert world.tracking.problem == "no such program"
        await world.stop()

    virtual(course())


@pytest.mark.parametrize(("confirmed", "patience_s"), [(0, START_PATIENCE_S), (3, PATIENCE_S)])
def test_a_process_that_hangs_is_ended(confirmed: int, patience_s: float) -> None:
    """Silence is a failure after the patience: longer while the library may still be loading. An idle node is none."""

    async def course() -> None:
        world = World()
        await asyncio.sleep(10 * START_PATIENCE_S)
        assert world.events() == []
        await world.step(confirmed)
        world.channels[0].hangs = True
        await world.step()
        await asyncio.sleep(patience_s - 2.0)
        assert world.events() == []
        await asyncio.sleep(4.0)
        assert world.channels[0].closed
        assert "written nothing for" in world.tracking.problem
        assert world.tracking.lost == 1
        await world.stop()

    virtual(course())


def test_a_slow_process_takes_no_memory() -> None:
    """While the pipe is full, records are dropped and counted instead of kept."""

    async def course() -> None:
        world = World()
        await world.step()
        world.channels[0].waiting = BUFFER_BYTES + 1
        await world.step(5)
        assert (len(world.channels[0].records), world.tracking.lost) == (1, 5)
        await world.stop()

    virtual(course())


def test_the_real_process_writes_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m p2pnode.tracking` writes what it gets, and ends with its input."""
    monkeypatch.setattr(service, "CLOSE_S", 120.0)  # a loaded machine starts Python slowly

    async def course() -> None:
        started = asyncio.Event()

        async def start(command: list[str]) -> ProcessChannel:
            channel = await ProcessChannel.start(command)
            started.set()
            return channel

        progress = Progress()
        writing = Writing(Tracker("csv", "steps.csv"), tmp_path, "digits", "a1b2")
        tracking = Tracking(writing, progress, clock=SystemClock(), log=NoLog(), start=start)
        task = asyncio.create_task(tracking.run())
        await asyncio.wait_for(started.wait(), 120.0)
        progress.steps.extend([{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await tracking.close()

    asyncio.run(course())

    with (tmp_path / "steps.csv").open(newline="", encoding="utf-8") as file:
        assert [(row["step"], row["loss"]) for row in csv.DictReader(file)] == [("1", "0.5"), ("2", "0.25")]


def test_the_real_process_says_why_it_cannot_write(tmp_path: Path) -> None:
    """A place that cannot be written is the reason in the log, in the system's words."""
    (tmp_path / "file").write_text("")

    async def course() -> str:
        failed = asyncio.Event()
        log = NoLog()
        log.warning = lambda event, **fields: failed.set()  # type: ignore[method-assign]
        writing = Writing(Tracker("csv", "file/steps.csv"), tmp_path, "digits", "a1b2")
        tracking = Tracking(writing, Progress(), clock=SystemClock(), log=log)
        task = asyncio.create_task(tracking.run())
        await asyncio.wait_for(failed.wait(), 120.0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await tracking.close()
        return tracking.problem

    assert "exists" in asyncio.run(course())
