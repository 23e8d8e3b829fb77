"""A store in one SQLite file: durable commits through the write-ahead log, and one master at a time.

The connection holds the file's exclusive lock for as long as it is open, and the kernel gives it up with the process. A
second master is refused. SQLite keeps no checksums of its pages, so every row has one here, and the head counts the
rows and chains their checksums: a damaged file is refused, never read wrongly. After an error of a write nobody knows
what was written; then the store is lost, and opening it anew reads what is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import stat
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from overlay.environment import Executor
from training.dispatch.store import MAX_ENTRY_BYTES, StoredQueueState, StoreHeld, StoreLost, StoreRefused

R = TypeVar("R")

#: "p2pq": other SQLite files are not taken for a queue.
APPLICATION_ID = 0x70327071
SCHEMA_VERSION = 1
PIECE_BYTES = 8 << 20
#: The write-ahead log is cut to this after a snapshot has made it longer.
JOURNAL_BYTES = 32 << 20

_SCHEMA = (
    "CREATE TABLE head (one INTEGER PRIMARY KEY CHECK (one = 1), epoch INTEGER NOT NULL, first INTEGER NOT NULL, "
    "last INTEGER NOT NULL, chain INTEGER NOT NULL, chunks INTEGER, snapshot INTEGER, checksum INTEGER NOT NULL)",
    "CREATE TABLE log (position INTEGER PRIMARY KEY, entry BLOB NOT NULL)",
    "CREATE TABLE part (name TEXT NOT NULL, piece INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (name, piece))",
)
_REMEDY = {
    "SQLITE_FULL": "the disk is full: free some space",
    "SQLITE_CORRUPT": "the file is damaged: restore it from a backup, or move it away to start the passes anew",
    "SQLITE_NOTADB": "the file is no SQLite database: move it away, or name another one in dispatch.store",
    "SQLITE_READONLY": "the file cannot be written: check its permissions and those of its folder",
    "SQLITE_CANTOPEN": "the file cannot be opened: check the folder and its permissions",
}


class _Head(NamedTuple):
    """The one row that says what the others are: entries `first` to `last`, the CRC-32 of all of them, and those of the
    two parts, None where there is none."""

    epoch: int = 0
    first: int = 1
    last: int = 0
    chain: int = 0
    chunks: int | None = None
    snapshot: int | None = None


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
        self._head = _Head()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def open(self) -> StoredQueueState:
        return await self._run(self._open)

    def check(self) -> None:
        if self._lost:
            raise StoreLost(f"the dispatch queue in {self.path} is not served: {self._lost}")

    async def append(self, entry: bytes) -> None:
        self.check()
        if len(entry) > MAX_ENTRY_BYTES:
            raise StoreRefused(f"an entry of {len(entry)} bytes is larger than {MAX_ENTRY_BYTES}")
        await self._run(lambda: self._append(entry))

    async def write_chunks(self, chunks: bytes) -> None:
        self.check()
        await self._run(lambda: self._write_chunks(chunks))

    async def write_snapshot(self, snapshot: bytes, entries: int) -> None:
        self.check()
        await self._run(lambda: self._write_snapshot(snapshot, entries))

    async def close(self) -> None:
        with contextlib.suppress(StoreLost):
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

    def _open(self) -> StoredQueueState:
        self._close("it is not open")
        try:
            self._prepare_file()
            self._connection = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
            state = self._read(self._connection)
            self._inode = self.path.stat().st_ino
        except sqlite3.Error as error:
            self._close("it could not be opened")
            if getattr(error, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
                raise StoreHeld(
                    f"{self.path} is in use by another master. Stop that one first, or give this node another "
                    "dispatch.store: a SQLite queue has one master"
                ) from error
            raise StoreLost(f"the dispatch queue in {self.path} cannot be opened: {_described(error)}") from error
        except OSError as error:
            self._close("it could not be opened")
            raise StoreLost(f"the dispatch queue in {self.path} cannot be opened: {error}") from error
        except _Damaged as error:
            self._close("it is damaged")
            raise StoreLost(
                f"the dispatch queue in {self.path} is damaged: {error}. {_REMEDY['SQLITE_CORRUPT']}"
            ) from error
        self._lost = ""
        return state

    def _prepare_file(self) -> None:
        """A new file with mode 0600. An existing one is never opened here: closing it would end our locks on it."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            if stat.S_IMODE(self.path.stat().st_mode) & 0o077:
                self.path.chmod(0o600)

    def _read(self, database: sqlite3.Connection) -> StoredQueueState:
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        # Before anything is changed: another program's file, or a newer version's, stays as it is.
        version = _number(database, "PRAGMA user_version")
        application = _number(database, "PRAGMA application_id")
        empty = not _number(database, "SELECT count(*) FROM sqlite_schema")
        if not empty and application != APPLICATION_ID:
            raise _Damaged("it is the SQLite file of another program")
        if not empty and version != SCHEMA_VERSION:
            raise _Damaged(f"it has schema version {version}, this program knows {SCHEMA_VERSION}")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute(f"PRAGMA journal_size_limit = {JOURNAL_BYTES}")
        database.execute("BEGIN EXCLUSIVE")
        if empty:
            database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            for statement in _SCHEMA:
                database.execute(statement)
            _write_head(database, _Head())
        problems = [row[0] for row in database.execute("PRAGMA integrity_check(1)")]
        if problems != ["ok"]:
            raise _Damaged(str(problems[0]))
        head, state = _read_rows(database)
        self._head = head._replace(epoch=head.epoch + 1)
        _write_head(database, self._head)
        database.execute("COMMIT")
        self.epoch = self._head.epoch
        return state

    def _append(self, entry: bytes) -> None:
        head = self._head._replace(last=self._head.last + 1, chain=zlib.crc32(entry, self._head.chain))

        def write(database: sqlite3.Connection) -> _Head:
            database.execute("INSERT INTO log VALUES (?, ?)", (head.last, entry))
            return head

        self._transact(write)

    def _write_chunks(self, chunks: bytes) -> None:
        head = self._head._replace(chunks=zlib.crc32(chunks))

        def write(database: sqlite3.Connection) -> _Head:
            _write_part(database, "chunks", chunks)
            return head

        self._transact(write)

    def _write_snapshot(self, snapshot: bytes, entries: int) -> None:
        head = self._head._replace(first=self._head.first + entries, snapshot=zlib.crc32(snapshot))

        def write(database: sqlite3.Connection) -> _Head:
            _write_part(database, "snapshot", snapshot)
            database.execute("DELETE FROM log WHERE position < ?", (head.first,))
            rest = database.execute("SELECT entry FROM log ORDER BY position")
            return head._replace(chain=_chained(row[0] for row in rest))

        self._transact(write)

    def _transact(self, write: Callable[[sqlite3.Connection], _Head]) -> None:
        """Write, with the head that this leads to, in one transaction."""
        database = self._connection
        if database is None:
            raise StoreLost(f"the dispatch queue in {self.path} is not served: {self._lost}")
        try:
            if self.path.stat().st_ino != self._inode:
                raise FileNotFoundError("another file is in its place")
            database.execute("BEGIN IMMEDIATE")
            head = write(database)
            _write_head(database, head)
            database.execute("COMMIT")
        except (sqlite3.Error, OSError) as error:
            why = _described(error)
            self._close(why)
            raise StoreLost(f"the dispatch queue in {self.path} cannot be written: {why}") from error
        self._head = head

    def _close(self, why: str) -> None:
        self._lost = why
        database, self._connection = self._connection, None
        if database is not None:
            with contextlib.suppress(sqlite3.Error):
                database.close()


class _Damaged(Exception):
    """The file is not what this program has written."""


def _write_head(database: sqlite3.Connection, head: _Head) -> None:
    row = (1, *head, zlib.crc32(repr(tuple(head)).encode()))
    database.execute("INSERT OR REPLACE INTO head VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)


def _read_rows(database: sqlite3.Connection) -> tuple[_Head, StoredQueueState]:
    rows = database.execute("SELECT epoch, first, last, chain, chunks, snapshot, checksum FROM head").fetchall()
    if len(rows) != 1 or zlib.crc32(repr(rows[0][:-1]).encode()) != rows[0][-1]:
        raise _Damaged("its head has a wrong checksum")
    head = _Head(*rows[0][:-1])
    found = database.execute("SELECT position, entry FROM log ORDER BY position").fetchall()
    entries = tuple(row[1] for row in found)
    if [row[0] for row in found] != list(range(head.first, head.last + 1)) or _chained(entries) != head.chain:
        raise _Damaged(f"its log is not that of {head.last - head.first + 1} entries that was written")
    parts = [_read_part(database, "chunks", head.chunks), _read_part(database, "snapshot", head.snapshot)]
    return head, StoredQueueState(parts[0], parts[1], entries)


def _write_part(database: sqlite3.Connection, name: str, data: bytes) -> None:
    database.execute("DELETE FROM part WHERE name = ?", (name,))
    for number, at in enumerate(range(0, len(data), PIECE_BYTES)):
        database.execute("INSERT INTO part VALUES (?, ?, ?)", (name, number, data[at : at + PIECE_BYTES]))


def _read_part(database: sqlite3.Connection, name: str, checksum: int | None) -> bytes | None:
    rows = database.execute("SELECT data FROM part WHERE name = ? ORDER BY piece", (name,)).fetchall()
    if checksum is None:
        return None
    data = b"".join(row[0] for row in rows)
    if zlib.crc32(data) != checksum:
        raise _Damaged(f"its {name} are not those that were written")
    return data


def _number(database: sqlite3.Connection, statement: str) -> int:
    return int(database.execute(statement).fetchone()[0])


def _chained(entries: Iterable[bytes]) -> int:
    chain = 0
    for entry in entries:
        chain = zlib.crc32(entry, chain)
    return chain


def _described(error: Exception) -> str:
    name = getattr(error, "sqlite_errorname", "")
    remedy = next((text for known, text in _REMEDY.items() if name.startswith(known)), "")
    return f"{error} ({name})" + (f"; {remedy}" if remedy else "") if name else str(error)
