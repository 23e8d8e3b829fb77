"""The capacity class on disk: how old it may be, and what a damaged file or a full disk does."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from p2pnode.overlay.line.capacity import UNKNOWN
from p2pnode.overlay.line.rate import MeasuredLine
from p2pnode.overlay.line.store import CAPACITY_FILE, MAX_AGE_S, CapacityStore, StoredCapacity
from tests.harness.environment.simulated import MemoryDisk, make_environment
from tests.harness.runner.stories import run_by

NOW = 1_800_000_000.0


class WallClock:
    def monotonic(self) -> float:
        return 5.0

    def wall(self) -> float:
        return NOW


class Lines:
    """Keeps the names of logged events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def warning(self, event: str, **_: Any) -> None:
        self.events.append(event)


def loaded(content: bytes | None) -> tuple[MeasuredLine, list[str]]:
    disk, log, line = MemoryDisk(), Lines(), MeasuredLine()
    if content is not None:
        disk.write(CAPACITY_FILE, content)
    CapacityStore(line, make_environment(clock=WallClock(), disk=disk, log=log)).load()
    return line, log.events


def stored(capacity: int, at: float) -> bytes:
    return msgspec.json.encode(StoredCapacity(capacity, at))


@pytest.mark.parametrize("age_s", [0.0, 60.0, MAX_AGE_S - 1, -60.0])
def test_a_young_capacity_is_the_first_estimate(age_s: float) -> None:
    """Up to a day old, and also if the clock was set back since."""
    line, events = loaded(stored(7, NOW - age_s))

    assert (line.capacity, line.capacity_source) == (7, "stored")
    assert events == []


@pytest.mark.parametrize("content", [None, stored(7, NOW - MAX_AGE_S - 1), stored(7, NOW + MAX_AGE_S + 1)])
def test_an_old_capacity_does_not_count(content: bytes | None) -> None:
    """The machine may be on another line: it is as if there were none."""
    line, events = loaded(content)

    assert line.capacity == UNKNOWN
    assert events == []


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[]", b'{"capacity": "7", "at": 1}', stored(0, NOW), stored(99, NOW), b"[" * 5000]
)
def test_a_damaged_file_is_logged_and_ignored(content: bytes) -> None:
    """Whatever it holds, the node starts."""
    line, events = loaded(content)

    assert line.capacity == UNKNOWN
    assert events == ["stored_capacity_unreadable"]


@run_by(asyncio.run)
async def test_a_capacity_is_written_once_and_a_stored_one_keeps_its_age() -> None:
    """A capacity that was only read again does not become younger; another one is written with its time."""
    disk, line = MemoryDisk(), MeasuredLine()
    disk.write(CAPACITY_FILE, stored(7, NOW - 3600.0))
    store = CapacityStore(line, make_environment(clock=WallClock(), disk=disk))
    store.load()
    await store.write()
    assert disk.files[CAPACITY_FILE] == stored(7, NOW - 3600.0)

    for _ in range(200):
        line.sent(0.25, 3_000_000, is_busy=True, is_full=True)
    await store.write()
    assert disk.files[CAPACITY_FILE] == stored(line.capacity, NOW)
    assert line.capacity != 7


def test_nothing_is_written_of_a_line_that_is_not_known() -> None:
    """A node that never sent anything leaves no file."""
    disk = MemoryDisk()
    asyncio.run(CapacityStore(MeasuredLine(), make_environment(clock=WallClock(), disk=disk)).write())

    assert disk.files == {}


@run_by(asyncio.run)
async def test_a_disk_that_fails_is_logged_once() -> None:
    """The node runs without the file, and tries again at the next change."""

    class FullDisk(MemoryDisk):
        def write(self, *_: Any, **__: Any) -> None:
            raise OSError("no space left on device")

    log, line = Lines(), MeasuredLine()
    store = CapacityStore(line, make_environment(disk=FullDisk(), log=log))
    line.begin(7, "transfers")
    await store.write()
    await store.write()
    assert log.events == ["capacity_not_stored"]
