"""A store in etcd: several masters may stand by, one holds the lock, and every write is conditioned on it.

    PREFIX/lock              who is the master, under its lease
    PREFIX/head              which snapshot and list of chunks count, and the first entry after the snapshot
    PREFIX/log/POSITION      one entry each
    PREFIX/parts/ID/PIECE    a snapshot or list of chunks, in pieces below etcd's request limit

A write is repeated until etcd has said whether it landed, or until the lease could have ended; then the store is lost.
That is safe, because each write compares what it replaces: an entry that there is no entry yet, the head that it is the
one known. So a delayed copy of a request changes nothing, and the ids of parts are never used again. Old entries and
parts are deleted after the head no longer refers to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from typing import Any

import msgspec

from overlay.environment import Environment
from training.dispatch.etcd_gateway import EtcdCalls, EtcdRefused, EtcdUnreachable, Json, coded, decoded
from training.dispatch.etcd_lock import EtcdLock
from training.dispatch.store import MAX_ENTRY_BYTES, StoredQueueState, StoreLost, StoreRefused

#: Below the limit, and coded within a millisecond on the event loop.
PIECE_BYTES = 256 << 10
#: Entries of one answer while the log is read.
PAGE = 100
#: Pause before a write is repeated.
REPEAT_S = 0.1
TTL_S = 10.0


class _Part(msgspec.Struct, frozen=True):
    """A snapshot or list of chunks: its pieces have `id` in their keys."""

    id: str
    pieces: int
    checksum: int


class _Head(msgspec.Struct, frozen=True):
    format: int = 1
    first: int = 1
    snapshot: _Part | None = None
    chunks: _Part | None = None


class EtcdStore:
    """The queue under `prefix`, such as `/p2pnode/run`. `name` is shown to masters that wait. Implements `Store`."""

    def __init__(
        self, calls: EtcdCalls, prefix: str, name: str, environment: Environment, ttl_s: float = TTL_S
    ) -> None:
        self.epoch = 0
        self._calls = calls
        self._prefix = prefix
        self._environment = environment
        unique = f"{name} {environment.entropy.token(8).hex()}".encode()
        self._lock = EtcdLock(calls, self._key("lock"), unique, environment, ttl_s)
        self._head = _Head()
        self._head_revision = 0
        self._last = 0
        self._parts = 0
        self._turn = asyncio.Lock()

    # -- life ------------------------------------------------------------------------------------------------------

    async def open(self) -> StoredQueueState:
        try:
            await self._lock.campaign()
            state = await self._read()
        except (EtcdRefused, EtcdUnreachable) as error:
            await self._lock.release()
            raise StoreLost(f"the dispatch queue in etcd cannot be opened: {error}") from error
        except StoreLost:
            await self._lock.release()
            raise
        self._lock.check()
        self.epoch = self._lock.fence
        return state

    def check(self) -> None:
        self._lock.check()

    async def close(self) -> None:
        await self._lock.release()
        await self._calls.close()

    # -- writing ---------------------------------------------------------------------------------------------------

    async def append(self, entry: bytes) -> None:
        if len(entry) > MAX_ENTRY_BYTES:
            raise StoreRefused(f"an entry of {len(entry)} bytes is larger than {MAX_ENTRY_BYTES}")
        position = self._last + 1
        await self._create(self._key(f"log/{position:016x}"), _sealed(entry))
        self._last = position

    async def write_chunks(self, chunks: bytes) -> None:
        async with self._turn:
            part = await self._write_part(chunks)
            await self._write_head(msgspec.structs.replace(self._head, chunks=part))

    async def write_snapshot(self, snapshot: bytes, entries: int) -> None:
        async with self._turn:
            former = self._head
            part = await self._write_part(snapshot)
            await self._write_head(msgspec.structs.replace(former, snapshot=part, first=former.first + entries))
            # What nothing refers to any more. What is left, the next master removes.
            with contextlib.suppress(StoreRefused):
                await self._delete(self._key("log/"), self._key(f"log/{self._head.first:016x}"))
                if former.snapshot is not None:
                    await self._delete_part(former.snapshot.id)

    async def _write_part(self, data: bytes) -> _Part:
        self._parts += 1
        # The fence makes it unique among masters, the counter in this one.
        identity = f"{self._lock.fence:016x}-{self._parts:08x}"
        pieces = [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)]
        for number, piece in enumerate(pieces):
            await self._create(self._key(f"parts/{identity}/{number:08x}"), piece)
        return _Part(identity, len(pieces), zlib.crc32(data))

    async def _write_head(self, head: _Head) -> None:
        key, value = coded(self._key("head")), msgspec.json.encode(head)
        expected = {"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": str(self._head_revision)}
        answer = await self._write(expected, {"request_put": {"key": key, "value": coded(value)}}, key, value)
        self._head, self._head_revision = head, answer

    async def _create(self, key: bytes, value: bytes) -> None:
        """Write a key that does not exist yet."""
        name = coded(key)
        expected = {"key": name, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        await self._write(expected, {"request_put": {"key": name, "value": coded(value)}}, name, value)

    async def _delete(self, start: bytes, end: bytes) -> None:
        """Delete a range of keys to which nothing refers."""
        await self._write(None, {"request_delete_range": {"key": coded(start), "range_end": coded(end)}}, "", b"")

    async def _delete_part(self, identity: str) -> None:
        await self._delete(self._key(f"parts/{identity}/"), self._key(f"parts/{identity}0"))  # "0" follows "/"

    async def _write(self, expected: Json | None, request: Json, key: str, value: bytes) -> int:
        """One conditioned write, repeated until its outcome is known. Returns the revision that has it.

        Raises `StoreRefused` when it was not executed, and `StoreLost` when the lock is lost or may be.
        """
        transaction = {
            "compare": [self._lock.compare(), *([expected] if expected else [])],
            "success": [request],
            "failure": [self._lock.read(), *([{"request_range": {"key": key}}] if key else [])],
        }
        uncertain = False
        while True:
            self._lock.check()
            try:
                answer = await self._calls.call("kv/txn", transaction, min(self._lock.request_s, self._lock.left_s))
            except EtcdRefused as error:
                if uncertain:  # an earlier copy may have landed, or land later
                    raise self._lock.lose(f"a write had an unknown outcome; then {error}") from error
                raise StoreRefused(str(error)) from error
            except EtcdUnreachable:
                uncertain = True
                await asyncio.sleep(REPEAT_S)
                continue
            if answer.get("succeeded"):
                return int(answer["header"]["revision"])
            return self._landed(answer["responses"], value)

    def _landed(self, responses: list[Json], value: bytes) -> int:
        """The comparison failed: an earlier copy of the write has landed, or this master is not the writer."""
        found = [(one["response_range"].get("kvs") or [{}])[0] for one in responses]
        if int(found[0].get("create_revision", 0)) != self._lock.fence:
            raise self._lock.lose("another master has taken over")
        if len(found) == 2 and decoded(found[1].get("value", "")) == value:
            return int(found[1]["mod_revision"])
        raise self._lock.lose("something else has changed the queue in etcd")

    # -- reading ---------------------------------------------------------------------------------------------------

    async def _read(self) -> StoredQueueState:
        """Everything at one revision, under the lock. Nobody else writes meanwhile."""
        found = await self._range(self._key("head"))
        kvs = found.get("kvs") or []
        if kvs:
            try:
                self._head = msgspec.json.decode(decoded(kvs[0]["value"]), type=_Head)
            except msgspec.MsgspecError as error:
                raise StoreLost(f"{self._prefix}/head in etcd cannot be read: {error}") from error
            if self._head.format != 1:
                raise StoreLost(f"{self._prefix}/head in etcd has format {self._head.format}, this program reads 1")
            self._head_revision = int(kvs[0]["mod_revision"])
        revision = found["header"]["revision"]
        entries = await self._read_log(revision)
        self._last = self._head.first + len(entries) - 1
        chunks = await self._read_part(self._head.chunks, revision)
        snapshot = await self._read_part(self._head.snapshot, revision)
        await self._sweep(revision)
        return StoredQueueState(chunks, snapshot, tuple(entries))

    async def _read_log(self, revision: str) -> list[bytes]:
        entries: list[bytes] = []
        end = self._key("log0")
        while True:
            start = self._key(f"log/{self._head.first + len(entries):016x}")
            found = await self._range(start, end, revision=revision, limit=str(PAGE))
            for one in found.get("kvs") or []:
                if decoded(one["key"]) != self._key(f"log/{self._head.first + len(entries):016x}"):
                    raise StoreLost(f"entry {self._head.first + len(entries)} of {self._prefix}/log is missing in etcd")
                entries.append(_opened(decoded(one.get("value", ""))))
            if not found.get("more"):
                return entries

    async def _read_part(self, part: _Part | None, revision: str) -> bytes | None:
        if part is None:
            return None
        pieces: list[bytes] = []
        for number in range(part.pieces):
            found = await self._range(self._key(f"parts/{part.id}/{number:08x}"), revision=revision)
            pieces += [decoded(one.get("value", "")) for one in found.get("kvs") or []]
        data = b"".join(pieces)
        if len(pieces) != part.pieces or zlib.crc32(data) != part.checksum:
            raise StoreLost(f"{self._prefix}/parts/{part.id} in etcd is not what was written")
        return data

    async def _sweep(self, revision: str) -> None:
        """Remove what a former master left behind: entries before the snapshot, and parts to which no head refers."""
        used = {part.id for part in (self._head.snapshot, self._head.chunks) if part is not None}
        found = await self._range(self._key("parts/"), self._key("parts0"), revision=revision, keys_only=True)
        skip = len(self._key("parts/"))
        present = {decoded(one["key"])[skip:].split(b"/")[0].decode() for one in found.get("kvs") or []}
        with contextlib.suppress(StoreRefused):
            for identity in sorted(present - used):
                await self._delete_part(identity)
            await self._delete(self._key("log/"), self._key(f"log/{self._head.first:016x}"))

    async def _range(self, start: bytes, end: bytes = b"", **more: Any) -> Json:
        """Read keys; repeated while etcd does not answer and the lock is held."""
        body = {"key": coded(start), **({"range_end": coded(end)} if end else {}), **more}
        while True:
            self._lock.check()
            try:
                return await self._calls.call("kv/range", body, self._lock.request_s)
            except EtcdUnreachable:
                await asyncio.sleep(REPEAT_S)

    def _key(self, name: str) -> bytes:
        return f"{self._prefix}/{name}".encode()


def _sealed(entry: bytes) -> bytes:
    return zlib.crc32(entry).to_bytes(4, "little") + entry


def _opened(value: bytes) -> bytes:
    entry = value[4:]
    if _sealed(entry) != value:
        raise StoreLost("an entry of the log in etcd has a wrong checksum")
    return entry
