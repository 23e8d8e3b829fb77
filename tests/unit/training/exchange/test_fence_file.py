"""The fences of a node survive its restart, and only those of its own run that leave room for later ones."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from p2pnode.training.exchange.fence_file import FENCES_FILE, FenceFile
from p2pnode.training.exchange.terms import TERM_LIMIT, ZERO_TERM
from tests.harness.builders.stores import IDS, contact, store_of, term
from tests.harness.environment.simulated import MemoryDisk
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import GENESIS, ScriptedSwarm, context_of, records_of


def started(files: dict[str, bytes]) -> tuple[Any, FenceFile, MemoryDisk]:
    """A node on the disk with these files."""
    context: Any = context_of(ScriptedSwarm(contact("a")), store_of("a"))
    disk = context.environment.disk
    disk.files = files
    return context, FenceFile(context.store.ownership, context.genesis, context.environment), disk


async def written(file: FenceFile, seconds: float) -> None:
    task = asyncio.create_task(file.run())
    await asyncio.sleep(seconds)
    task.cancel()


def test_fences_are_there_after_a_restart() -> None:
    """The highest of each shard; one that the disk has is not lowered by what comes later."""

    async def scenario() -> None:
        context, file, disk = started({})
        ownership = context.store.ownership
        ownership.raise_fence(0, term(3, "a"))
        ownership.raise_fence(0, term(2, "b"))
        ownership.raise_fence(2, term(7, "b"))
        await written(file, 1.5)

        again, _, _ = started(dict(disk.files))
        fences = [again.store.ownership.fence(shard) for shard in range(4)]
        assert fences == [term(3, "a"), ZERO_TERM, term(7, "b"), ZERO_TERM]
        again.store.ownership.raise_fence(2, term(6, "a"))
        assert again.store.ownership.fence(2) == term(7, "b")

    run(scenario())


def test_the_file_is_written_when_something_changed_and_once_a_second_at_most() -> None:
    """A node that hears nothing new writes nothing."""

    async def scenario() -> None:
        context, file, disk = started({})
        await written(file, 5.5)
        assert disk.writes == 0
        task = asyncio.create_task(file.run())
        for number in range(1, 31):
            context.store.ownership.raise_fence(0, term(number, "a"))
            await asyncio.sleep(0.1)
        await asyncio.sleep(5.0)
        task.cancel()
        assert 3 <= disk.writes <= 4
        assert started(dict(disk.files))[0].store.ownership.fence(0) == term(30, "a")

    run(scenario())


def test_a_disk_that_is_full_is_tried_again() -> None:
    """One error in the log however long it lasts, another one when it happens again, and nothing is lost."""

    async def scenario() -> None:
        context, file, disk = started({})
        task = asyncio.create_task(file.run())
        for number in (1, 2):
            disk.full = True
            context.store.ownership.raise_fence(1, term(number, "a"))
            await asyncio.sleep(4.5)
            assert len([one for one in records_of(context) if one.event == "fences_not_written"]) == number
            disk.full = False
            await asyncio.sleep(2.0)
            assert started(dict(disk.files))[0].store.ownership.fence(1) == term(number, "a")
        task.cancel()

    run(scenario())


@pytest.mark.parametrize(
    ("raw", "events"),
    [
        (b"", ["fences_unreadable"]),
        (b"\xff" * 40, ["fences_unreadable"]),
        (msgspec.msgpack.encode((GENESIS, {0: (1 << 62, IDS["a"])})), ["fences_unreadable"]),
        (msgspec.msgpack.encode((b"x" * 16, {0: (5, IDS["a"])})), []),
        (msgspec.msgpack.encode((GENESIS, {})), []),
        (msgspec.msgpack.encode((GENESIS, {0: (TERM_LIMIT, IDS["a"])})), ["fence_passed_over"]),
    ],
    ids=["empty", "garbage", "no term", "another run", "none", "no room for later ones"],
)
def test_a_file_that_is_of_no_use_raises_no_fence(raw: bytes, events: list[str]) -> None:
    """The node starts; what was wrong with its file is in the log. A file of another run is not wrong."""

    async def scenario() -> None:
        context, _, _ = started({FENCES_FILE: raw})
        assert context.store.ownership.fences == {}
        assert [one.event for one in records_of(context)] == events

    run(scenario())


def test_a_fence_that_leaves_no_room_does_not_take_the_others_with_it() -> None:
    """Only that one is passed over."""

    async def scenario() -> None:
        rows = {0: (TERM_LIMIT, IDS["a"]), 1: (TERM_LIMIT - 1, IDS["a"]), 2: (5, IDS["b"])}
        context, _, _ = started({FENCES_FILE: msgspec.msgpack.encode((GENESIS, rows))})
        assert context.store.ownership.fences == {1: term(TERM_LIMIT - 1, "a"), 2: term(5, "b")}

    run(scenario())
