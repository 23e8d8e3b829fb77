"""Faults of the simulated disk, and the log by which two histories are compared."""

from __future__ import annotations

import asyncio
import errno

import pytest

from p2pnode.overlay.environment import Log
from tests.harness.environment.simulated import ListLog, MemoryDisk, Record
from tests.harness.environment.simulated import digest as digest_of
from tests.harness.environment.virtual_loop import run


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


def test_list_log() -> None:
    """Events of all nodes land in one list with their virtual time; equal histories have equal digests, others not."""

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
    assert digest_of(records[:1]) != digest
