"""The SQLite store: durable, one master at a time, and never read wrongly."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from p2pnode.training.dispatch.sqlite_store import SqliteStore
from p2pnode.training.dispatch.store import StoreHeld, StoreLost
from tests.harness.environment.simulated import InlineExecutor
from tests.harness.project.repository import ROOT


@contextlib.asynccontextmanager
async def opened(path: Path) -> AsyncIterator[tuple[SqliteStore, dict[str, bytes]]]:
    """A store, open and closed again."""
    store = SqliteStore(path, InlineExecutor())
    try:
        yield store, await store.open()
    finally:
        await store.close()


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


async def filled(path: Path) -> dict[str, bytes]:
    """A file with rows of which some were replaced."""
    written = {f"task/{number}": b"row %d" % number * 300 for number in range(40)}
    async with opened(path) as (store, _):
        await store.write({"chunks/0000": b"the chunks" * 500})
        await store.write(written)
        await store.write({"task/3": b"another"})
    return {**written, "chunks/0000": b"the chunks" * 500, "task/3": b"another"}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """The rows, as they were written last, are what the next master reads; its epoch is higher."""

    async def scenario() -> None:
        written = await filled(tmp_path / "queue")
        async with opened(tmp_path / "queue") as (store, state):
            assert state == written
            assert store.epoch == 2

    run(scenario)


def test_a_second_master_is_refused(tmp_path: Path) -> None:
    """While one master has the file another one is refused with a reason, and the first goes on."""

    async def scenario() -> None:
        async with opened(tmp_path / "queue") as (store, _):
            with pytest.raises(StoreHeld, match="another master"):
                await SqliteStore(tmp_path / "queue", InlineExecutor()).open()
            await store.write({"a": b"still here"})
        async with opened(tmp_path / "queue") as (_, state):
            assert state == {"a": b"still here"}

    run(scenario)


WRITES_FOR_EVER = """
import asyncio, itertools, sys
from pathlib import Path
from tests.harness.environment.simulated import InlineExecutor
from p2pnode.training.dispatch.sqlite_store import SqliteStore

async def main():
    store = SqliteStore(Path(sys.argv[1]), InlineExecutor())
    await store.open()
    for number in itertools.count():
        await store.write({"a": b"%d" % number, str(number): b""})
        print(number, flush=True)

asyncio.run(main())
"""


def test_a_killed_master_loses_nothing_that_it_had_acknowledged(tmp_path: Path) -> None:
    """While a process holds the file it is refused to others; after SIGKILL every acknowledged write is there,
    and each is whole."""
    command = [sys.executable, "-c", WRITES_FOR_EVER, str(tmp_path / "queue")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as writer:
        assert writer.stdout is not None
        for _ in range(100):
            writer.stdout.readline()

        async def refused() -> None:
            with pytest.raises(StoreHeld):
                await SqliteStore(tmp_path / "queue", InlineExecutor()).open()

        run(refused)
        writer.send_signal(signal.SIGKILL)
        acknowledged = 100 + len([line for line in writer.stdout if line.endswith("\n")])

    async def recovered() -> None:
        async with opened(tmp_path / "queue") as (_, state):
            last = int(state.pop("a"))
            assert acknowledged <= last + 1 <= acknowledged + 1
            assert state == {str(number): b"" for number in range(last + 1)}

    run(recovered)


def test_a_full_disk_ends_the_service(tmp_path: Path) -> None:
    """A write that finds no space says so and loses the store; what was acknowledged before is there."""

    async def scenario() -> None:
        async with opened(tmp_path / "queue") as (store, _):
            await store.write({"a": b"first"})
            assert store._connection is not None
            store._connection.execute("PRAGMA max_page_count = 8")
            with pytest.raises(StoreLost, match="the disk is full"):
                await store.write({"b": b"second", "c": os.urandom(100_000)})
            with pytest.raises(StoreLost, match="the disk is full"):
                store.check()
            with pytest.raises(StoreLost):
                await store.write({"d": b"third"})
        async with opened(tmp_path / "queue") as (_, state):
            assert state == {"a": b"first"}

    run(scenario)


def test_flipped_bits_are_never_read_as_something_else(tmp_path: Path) -> None:
    """Of 200 files with one flipped bit each, every one is refused or gives exactly what was written."""

    async def scenario() -> None:
        written = await filled(tmp_path / "queue")
        sound = (tmp_path / "queue").read_bytes()
        chosen, refused = random.Random(21), 0
        for number in range(200):
            place = chosen.randrange(8 * len(sound))
            damaged = bytearray(sound)
            damaged[place // 8] ^= 1 << place % 8
            # A name of its own each: a refused file may leave a log beside it.
            (tmp_path / str(number)).write_bytes(damaged)
            try:
                async with opened(tmp_path / str(number)) as (_, state):
                    assert state == written, f"bit {place}"
            except StoreLost:
                refused += 1
        assert refused > 20

    run(scenario)


def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    """A new file has mode 0600, with its log beside it, and one that others could read is closed to them."""

    async def scenario() -> None:
        path = tmp_path / "folder" / "queue"
        async with opened(path) as (store, _):
            await store.write({"a": b"row"})
            modes = {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
            assert modes == {0o600}
        path.chmod(0o644)
        async with opened(path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600

    run(scenario)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    """A database of another program, a newer version's, and no database at all are refused and stay as they are."""
    with contextlib.closing(sqlite3.connect(tmp_path / "other")) as other:
        other.execute("CREATE TABLE theirs (x)")
        other.commit()
    (tmp_path / "text").write_bytes(b"not a database" * 100)

    async def scenario() -> None:
        await filled(tmp_path / "newer")
        with contextlib.closing(sqlite3.connect(tmp_path / "newer")) as newer:
            newer.execute("PRAGMA user_version = 3")
        for name, reason in (
            ("other", "another program"),
            ("text", "no SQLite database"),
            ("newer", "schema version 3"),
        ):
            before = (tmp_path / name).read_bytes()
            with pytest.raises(StoreLost, match=reason):
                await SqliteStore(tmp_path / name, InlineExecutor()).open()
            assert (tmp_path / name).read_bytes() == before

    run(scenario)


def test_a_file_that_was_replaced_is_noticed(tmp_path: Path) -> None:
    """A master whose file was moved away writes nowhere else, and says so."""

    async def scenario() -> None:
        async with opened(tmp_path / "queue") as (store, _):
            (tmp_path / "queue").rename(tmp_path / "moved")
            (tmp_path / "queue").write_bytes(b"")
            with pytest.raises(StoreLost, match="another file"):
                await store.write({"a": b"row"})

    run(scenario)
