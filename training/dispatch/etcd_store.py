"""A store in etcd: several masters may stand by, one holds the lock, and every write is conditioned on it.

    PREFIX/lock        who is the master, under its lease
    PREFIX/head        the number of the last write
    PREFIX/rows/KEY    a row

A write is repeated until etcd has said whether it landed, or until the lease could have ended; then the store is lost.
That is safe, because each write replaces the head, and compares that it is the one known: a delayed copy of a request
changes nothing.

The lock is a key with a lease, and its create revision is the fencing token. A master campaigns by creating the key
under a lease of its own; etcd deletes it when the lease ends. Every write compares the key's create revision, so a
former master cannot write, however late its request arrives. Besides, a master stops by its own clock before its lease
could have ended: the time counts from when the last renewal was *sent*, less a tenth. (A machine that was suspended may
have a clock that stood still; then the revision alone protects, and reads are those of a moment ago.)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from p2pnode.overlay.environment import Environment
from p2pnode.training.dispatch.etcd_gateway import EtcdGateway, EtcdRefused, EtcdUnreachable, Json, coded, decoded
from p2pnode.training.dispatch.store import StoreLost

#: Rows of one answer while they are read.
PAGE = 500
#: Pause before a write is repeated.
REPEAT_S = 0.1
TTL_S = 10.0
#: Share of the lease that is given up for clocks that run at different speeds.
MARGIN = 0.1


class EtcdLock:
    """The lock `key`, held for `ttl_s` after the last renewal. `name` is unique to this master and this start."""

    def __init__(self, calls: EtcdGateway, key: bytes, name: bytes, environment: Environment, ttl_s: float) -> None:
        self._calls = calls
        self._key = key
        self._name = name
        self._environment = environment
        self._ttl_s = ttl_s
        self._lease = ""
        self._until = 0.0
        self._lost = "the lock was never held"
        self._renewals: asyncio.Task[None] | None = None
        #: The create revision of the lock's key; 0 while it is not held.
        self.fence = 0

    @property
    def request_s(self) -> float:
        """How long one request may take: three renewals fit into a lease."""
        return self._ttl_s / 3

    @property
    def left_s(self) -> float:
        """How long this master may go on without a renewal."""
        return self._until - self._environment.clock.monotonic()

    def check(self) -> None:
        """Raise `StoreLost` unless the lock is held, by the clock of this machine."""
        if not self._lost and self.left_s <= 0:
            self.lose(
                "its lease on the lock was not renewed in time: etcd was unreachable, or this process stood still"
            )
        if self._lost:
            raise StoreLost(f"this master does not hold the lock in etcd: {self._lost}")

    def lose(self, why: str) -> StoreLost:
        """Remember that the lock is lost; returns the error to raise."""
        self._lost = self._lost or why
        return StoreLost(f"this master does not hold the lock in etcd: {self._lost}")

    def compare(self) -> Json:
        """The comparison that every write is conditioned on."""
        return {
            "key": coded(self._key),
            "target": "CREATE",
            "result": "EQUAL",
            "create_revision": str(self.fence),
        }

    def read(self) -> Json:
        """The request that tells who holds the lock, for the other branch of a transaction."""
        return {"request_range": {"key": coded(self._key)}}

    async def campaign(self) -> None:
        """Wait until the lock is held, for ever if need be: while another holds it, or etcd does not answer."""
        told = ""
        while not self.fence:
            try:
                holder = await self._try()
            except EtcdUnreachable as error:
                holder = str(error)
            if holder != told and not self.fence:
                self._environment.log.info("dispatch_master_waits", reason=holder)
                told = holder
            if not self.fence:
                await asyncio.sleep(min(max(self._ttl_s / 10, 0.1), 1.0))
        self._lost = ""
        self._renewals = asyncio.create_task(self._renew(), name="dispatch-lock")

    async def _try(self) -> str:
        """Create the key if there is none. Returns who has it, or an empty text."""
        found = await self._calls.call("kv/range", {"key": coded(self._key)}, self.request_s)
        if found.get("kvs"):
            return self._take(found)
        sent = self._environment.clock.monotonic()
        granted = await self._calls.call("lease/grant", {"TTL": str(round(self._ttl_s)), "ID": "0"}, self.request_s)
        self._lease = str(granted["ID"])
        self._until = sent + int(granted["TTL"]) * (1 - MARGIN)
        answer = await self._calls.call(
            "kv/txn",
            {
                "compare": [{"key": coded(self._key), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}],
                "success": [
                    {"request_put": {"key": coded(self._key), "value": coded(self._name), "lease": self._lease}}
                ],
                "failure": [self.read()],
            },
            self.request_s,
        )
        if answer.get("succeeded"):
            self.fence = int(answer["header"]["revision"])
            return ""
        return self._take(answer["responses"][0]["response_range"])

    def _take(self, found: Json) -> str:
        """Whose lock this is. An answer may have been lost: then it is ours already."""
        holders = found.get("kvs") or [{}]
        value = decoded(holders[0].get("value", ""))
        if value == self._name and str(holders[0].get("lease", "")) == self._lease and self.left_s > 0:
            self.fence = int(holders[0]["create_revision"])
            return ""
        return f"{value.decode(errors='replace')} is the master" if value else "another campaigns"

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            sent = self._environment.clock.monotonic()
            try:
                answer = await self._calls.call("lease/keepalive", {"ID": self._lease}, self.request_s)
            except EtcdUnreachable as error:
                self._environment.log.warning(
                    "dispatch_lock_not_renewed", error=str(error), left_s=round(self.left_s, 1)
                )
                continue
            except EtcdRefused as error:
                self.lose(str(error))
                return
            ttl_s = int(answer.get("TTL", 0))
            if ttl_s <= 0:
                self.lose("its lease has ended")
                return
            self._until = max(self._until, sent + ttl_s * (1 - MARGIN))

    async def release(self) -> None:
        """Give the lock to others at once. Raises nothing."""
        self.lose("it was given up")
        if self._renewals is not None:
            self._renewals.cancel()
            await asyncio.gather(self._renewals, return_exceptions=True)
        if self._lease:
            with contextlib.suppress(EtcdUnreachable, EtcdRefused):
                await self._calls.call("lease/revoke", {"ID": self._lease}, min(self.request_s, 1.0))
            self._lease = ""


class EtcdStore:
    """The queue under `prefix`, such as `/p2pnode/run`. `name` is shown to masters that wait. Implements `Store`."""

    def __init__(
        self, calls: EtcdGateway, prefix: str, name: str, environment: Environment, ttl_s: float = TTL_S
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
