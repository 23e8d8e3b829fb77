"""A store in etcd: several masters may stand by, one holds the lock, and every write is conditioned on it.

    PREFIX/lock        who is the master, under its lease
    PREFIX/head        the number of the last write
    PREFIX/rows/KEY    a row

A write is repeated until etcd has said whether it landed, or until the lease could have ended; then the store is lost.
That is safe, because each write replaces the head, and compares that it is the one known: a delayed copy of a request
changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from p2pnode.overlay.environment import Environment
from p2pnode.training.dispatch.etcd_gateway import EtcdCalls, EtcdRefused, EtcdUnreachable, Json, coded, decoded
from p2pnode.training.dispatch.etcd_lock import EtcdLock
from p2pnode.training.dispatch.store import StoreLost

#: Rows of one answer while they are read.
PAGE = 500
#: Pause before a write is repeated.
REPEAT_S = 0.1
TTL_S = 10.0


class EtcdStore:
    """The queue under `prefix`, such as `/p2pnode/run`. `name` is shown to masters that wait. Implements `Store`."""

    def __init__(
        self, calls: EtcdCalls, prefix: str, name: str, environment: Environment, ttl_s: float = TTL_S
    ) -> None:
        self.epoch = 0
        self._calls = calls
        self._prefix = prefix
        unique = f"{name} {environment.entropy.token(8).hex()}".encode()
        self._lock = EtcdLock(calls, self._key("lock"), unique, environment, ttl_s)
        self._head_revision = 0
        self._writes = 0

    async def open(self) -> dict[str, bytes]:
        try:
            await self._lock.campaign()
            rows = await self._read()
        except (EtcdRefused, EtcdUnreachable) as error:
            await self._lock.release()
            raise StoreLost(f"the dispatch queue in etcd cannot be opened: {error}") from error
        except StoreLost:
            await self._lock.release()
            raise
        self._lock.check()
        self.epoch = self._lock.fence
        return rows

    def check(self) -> None:
        self._lock.check()

    async def close(self) -> None:
        await self._lock.release()
        await self._calls.close()

    async def write(self, rows: Mapping[str, bytes]) -> None:
        self._writes += 1
        head = coded(self._key("head"))
        # The fence makes it unique among masters, the number in this one.
        value = coded(b"%d/%d" % (self._lock.fence, self._writes))
        puts = [{"key": coded(self._key(f"rows/{key}")), "value": coded(row)} for key, row in rows.items()]
        transaction = {
            "compare": [
                self._lock.compare(),
                {"key": head, "target": "MOD", "result": "EQUAL", "mod_revision": str(self._head_revision)},
            ],
            "success": [{"request_put": put} for put in [{"key": head, "value": value}, *puts]],
            "failure": [self._lock.read(), {"request_range": {"key": head}}],
        }
        while True:
            self._lock.check()
            try:
                answer = await self._calls.call("kv/txn", transaction, min(self._lock.request_s, self._lock.left_s))
                break
            except EtcdRefused as error:  # an earlier copy may have landed, or land later
                raise self._lock.lose(f"etcd refused a write: {error}") from error
            except EtcdUnreachable:
                await asyncio.sleep(REPEAT_S)
        if answer.get("succeeded"):
            self._head_revision = int(answer["header"]["revision"])
        else:
            self._head_revision = self._landed(answer["responses"], value)

    def _landed(self, responses: list[Json], head: str) -> int:
        """The comparison failed: an earlier copy of the write has landed, or this master is not the writer."""
        lock, found = [(one["response_range"].get("kvs") or [{}])[0] for one in responses]
        if int(lock.get("create_revision", 0)) != self._lock.fence:
            raise self._lock.lose("another master has taken over")
        if found.get("value") != head:
            raise self._lock.lose("something else has changed the queue in etcd")
        return int(found["mod_revision"])

    async def _read(self) -> dict[str, bytes]:
        """Everything at one revision, under the lock. Nobody else writes meanwhile."""
        found = await self._range(self._key("head"))
        self._head_revision = int((found.get("kvs") or [{}])[0].get("mod_revision", 0))
        revision = found["header"]["revision"]
        rows: dict[str, bytes] = {}
        start, skip = self._key("rows/"), len(self._key("rows/"))
        while True:
            found = await self._range(start, self._key("rows0"), revision=revision, limit=str(PAGE))  # "0" follows "/"
            for one in found.get("kvs") or []:
                start = decoded(one["key"]) + b"\0"
                rows[start[skip:-1].decode()] = decoded(one.get("value", ""))
            if not found.get("more"):
                return rows

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
