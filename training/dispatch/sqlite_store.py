"""A store in one SQLite file: durable commits through the write-ahead log, and one master at a time.

The connection holds the file's exclusive lock for as long as it is open, and the kernel gives it up with the process. A
second master is refused. SQLite keeps no checksums of its pages, so every row has one here: a damaged file is refused,
never read wrongly. After an error of a write nobody knows what was written; then the store is lost, and opening it anew
reads what is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import stat
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from p2pnode.overlay.environment import Executor
from p2pnode.training.dispatch.store import StoreHeld, StoreLost

R = TypeVar("R")

#: "p2pq": other SQLite files are not taken for a queue.
APPLICATION_ID = 0x70327071
SCHEMA_VERSION = 2
_SCHEMA = "CREATE TABLE row (key TEXT PRIMARY KEY, value BLOB NOT NULL, checksum INTEGER NOT NULL) WITHOUT ROWID"
#: The row that counts how often the store was opened.
_EPOCH = "epoch"
_REMEDY = {
    "SQLITE_FULL": "the disk is full: free some space",
    "SQLITE_CORRUPT": "the file is damaged: restore it from a backup, or move it away to start the passes anew",
    "SQLITE_NOTADB": "the file is no SQLite database: move it away, or name another one in dispatch.store",
    "SQLITE_READONLY": "the file cannot be written: check its permissions and those of its folder",
    "SQLITE_CANTOPEN": "the file cannot be opened: check the folder and its permissions",
}


class SqliteStore:
    """The queue in the file `path`, which is created with access for its owner alone. Implements `Store`."""

    def __init__(self, path: Path, executor: Executor) -> None:
        self.path = path
        self.epoch = 0
        self._executor = executor
        self._connection: sqlite3.Connection | None = None
        self._turn = asyncio.Lock()
        self._lost = "it is not open"
        self._inode = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    async def open(self) -> dict[str, bytes]:
        return await self._run(self._open)

    def check(self) -> None:
        if self._lost:
            raise StoreLost(f"the dispatch queue in {self.path} is not served: {self._lost}")

    async def write(self, rows: Mapping[str, bytes]) -> None:
        self.check()
        await self._run(lambda: self._write(rows))

    async def close(self) -> None:
        await self._run(lambda: self._close("it was closed"))

    # -- in a thread of the executor, one call at a time -----------------------------------------------------------

    async def _run(self, function: Callable[[], R]) -> R:
        """A write that has begun ends, whether its caller waits for it or not: otherwise the next would overtake it."""

        async def in_turn() -> R:
            async with self._turn:
                return await self._executor.run(function)

        task = asyncio.create_task(in_turn())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    def _open(self) -> dict[str, bytes]:
        self._close("it could not be opened")
        try:
            self._prepare_file()
            self._connection = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
            rows = self._read(self._connection)
            self._inode = self.path.stat().st_ino
        except (sqlite3.Error, OSError) as error:
            self._close("it could not be opened")
            if getattr(error, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
                raise StoreHeld(
                    f"{self.path} is in use by another master. Stop that one first, or give this node another "
                    "dispatch.store: a SQLite queue has one master"
                ) from error
            raise StoreLost(f"the dispatch queue in {self.path} cannot be opened: {_described(error)}") from error
        except _Damaged as error:
            self._close("it is damaged")
            raise StoreLost(
                f"the dispatch queue in {self.path} is damaged: {error}. {_REMEDY['SQLITE_CORRUPT']}"
            ) from error
        self._lost = ""
        return rows

    def _prepare_file(self) -> None:
        """A new file with mode 0600. An existing one is never opened here: closing it would end our locks on it."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            if stat.S_IMODE(self.path.stat().st_mode) & 0o077:
                self.path.chmod(0o600)

    def _read(self, database: sqlite3.Connection) -> dict[str, bytes]:
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        # Before anything is changed: another program's file, or another version's, stays as it is.
        version = _number(database, "PRAGMA user_version")
        application = _number(database, "PRAGMA application_id")
        empty = not _number(database, "SELECT count(*) FROM sqlite_schema")
        if not empty and application != APPLICATION_ID:
            raise _Damaged("it is the SQLite file of another program")
        if not empty and version != SCHEMA_VERSION:
            raise _Damaged(f"it has schema version {version}, this program knows {SCHEMA_VERSION}")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute("BEGIN EXCLUSIVE")
        if empty:
            database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            database.execute(_SCHEMA)
        problems = [row[0] for row in database.execute("PRAGMA integrity_check(1)")]
        if problems != ["ok"]:
            raise _Damaged(str(problems[0]))
        rows: dict[str, bytes] = {}
        for key, value, checksum in database.execute("SELECT key, value, checksum FROM row"):
            if _checksum(key, value) != checksum:
                raise _Damaged("a row has a wrong checksum")
            rows[key] = value
        self.epoch = int(rows.pop(_EPOCH, b"0")) + 1
        _put(database, {_EPOCH: b"%d" % self.epoch})
        database.execute("COMMIT")
        return rows

    def _write(self, rows: Mapping[str, bytes]) -> None:
        database = self._connection
        if database is None:
            raise StoreLost(f"the dispatch queue in {self.path} is not served: {self._lost}")
        try:
            if self.path.stat().st_ino != self._inode:
                raise FileNotFoundError("another file is in its place")
            database.execute("BEGIN IMMEDIATE")
            _put(database, rows)
            database.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            why = _described(error)
            self._close(why)
            raise StoreLost(f"the dispatch queue in {self.path} cannot be written: {why}") from error

    def _close(self, why: str) -> None:
        self._lost = why
        database, self._connection = self._connection, None
        if database is not None:
            with contextlib.suppress(sqlite3.Error):
                database.close()


class _Damaged(Exception):
    """The file is not what this program has written."""


def _put(database: sqlite3.Connection, rows: Mapping[str, bytes]) -> None:
    found = [(key, value, _checksum(key, value)) for key, value in rows.items()]
    database.executemany("INSERT OR REPLACE INTO row VALUES (?, ?, ?)", found)


def _checksum(key: str, value: bytes) -> int:
    return zlib.crc32(value, zlib.crc32(key.encode()))


def _number(database: sqlite3.Connection, statement: str) -> int:
    return int(database.execute(statement).fetchone()[0])


def _described(error: Exception) -> str:
    name = getattr(error, "sqlite_errorname", "")
    remedy = next((text for known, text in _REMEDY.items() if name.startswith(known)), "")
    return f"{error} ({name})" + (f"; {remedy}" if remedy else "") if name else str(error)
