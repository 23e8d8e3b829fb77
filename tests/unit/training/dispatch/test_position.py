"""The position of a node in its tasks: kept for its own queue, and no more than the position is lost by a fault."""

from __future__ import annotations

from typing import Any

import pytest

from p2pnode.training.dispatch.held import SavedTask
from p2pnode.training.dispatch.worker import STATE_FILE, PositionFile
from p2pnode.training.trainer_link.record_messages import RecordTask
from tests.harness.environment.simulated import InlineExecutor, ListLog, MemoryDisk, make_environment
from tests.harness.environment.virtual_loop import run

TASKS = [SavedTask(RecordTask(3, 2, 1, 0, 0, []), 60.0, 5)]


def position_file() -> tuple[PositionFile, MemoryDisk, ListLog]:
    disk, log = MemoryDisk(), ListLog([])
    return PositionFile(make_environment(disk=disk, log=log, executor=InlineExecutor())), disk, log


def test_tasks_are_found_again_by_their_queue_alone() -> None:
    """Another queue has other tasks of the same numbers."""

    async def scenario() -> None:
        position, _, log = position_file()
        assert await position.read(b"queue") == []
        await position.write(b"queue", TASKS)
        assert await position.read(b"queue") == TASKS
        assert await position.read(b"other") == []
        await position.write(b"queue", [])
        assert await position.read(b"queue") == []
        assert log.records == []

    run(scenario())


def test_a_disk_that_is_full_costs_the_position_alone() -> None:
    """It is logged; what was written before stays."""

    async def scenario() -> None:
        position, disk, log = position_file()
        await position.write(b"queue", TASKS)
        disk.full = True
        await position.write(b"queue", [])
        assert [one.event for one in log.records] == ["dispatch_position_not_written"]
        assert await position.read(b"queue") == TASKS

    run(scenario())


@pytest.mark.parametrize("content", [b"", b"{", b'{"schema": 1}', None])
def test_a_file_that_cannot_be_read_is_no_position(content: Any) -> None:
    """Damaged, of another form, or not readable for this user; it is logged."""

    async def scenario() -> None:
        position, disk, log = position_file()
        disk.files[STATE_FILE] = content or b""
        if content is None:
            disk.unreadable.add(STATE_FILE)
        assert await position.read(b"queue") == []
        assert [one.event for one in log.records] == ["dispatch_position_not_read"]

    run(scenario())
