"""etcd in memory, on the time of the loop: what a store uses of its JSON gateway, with the faults of a network.

`FakeEtcd` is the cluster; each master has a `FakeCalls` of its own, whose requests fail before or after they are
executed, arrive late (when nobody waits for them any more), or arrive twice.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

from p2pnode.training.dispatch.etcd_gateway import EtcdRefused, EtcdUnreachable, coded, decoded

Json = dict[str, Any]


@dataclass
class Kept:
    """One key."""

    value: bytes
    created: int
    changed: int
    lease: str


@dataclass
class FakeEtcd:
    """The cluster. `limit_bytes` is that of a request; `full` refuses writes as an exhausted quota does."""

    limit_bytes: int = 3 << 19
    full: bool = False
    revision: int = 1
    keys: dict[bytes, Kept] = field(default_factory=dict)
    leases: dict[str, tuple[int, float]] = field(default_factory=dict)
    granted: int = 0
    #: (fence, key) of every put that landed beside the lock's own.
    landed: list[tuple[int, bytes]] = field(default_factory=list)

    def execute(self, path: str, body: Json) -> Json:
        self._expire()
        if len(str(body)) * 3 // 4 > self.limit_bytes:
            raise EtcdRefused(3, "etcdserver: request is too large")
        if path == "kv/range":
            return self._headed(self._range(body))
        if path == "kv/txn":
            return self._txn(body)
        now = asyncio.get_running_loop().time()
        if path == "lease/grant":
            self.granted += 1
            self.leases[str(self.granted)] = (int(body["TTL"]), now + int(body["TTL"]))
            return self._headed({"ID": str(self.granted), "TTL": body["TTL"]})
        if path == "lease/keepalive":
            lease = body["ID"]
            if lease not in self.leases:
                return self._headed({"ID": lease})
            ttl_s = self.leases[lease][0]
            self.leases[lease] = (ttl_s, now + ttl_s)
            return self._headed({"ID": lease, "TTL": str(ttl_s)})
        assert path == "lease/revoke"
        self._end(body["ID"])
        return self._headed({})

    def _txn(self, body: Json) -> Json:
        holds = all(self._compare(one) for one in body["compare"])
        requests = body["success"] if holds else body["failure"]
        writes = [one for one in requests if "request_range" not in one]
        if writes and self.full:
            raise EtcdRefused(8, "etcdserver: mvcc: database space exceeded")
        if any(one.get("request_put", {}).get("lease", "") not in ("", *self.leases) for one in writes):
            raise EtcdRefused(5, "etcdserver: requested lease not found")  # a late copy must not hold a lock for ever
        self.revision += bool(writes)
        responses = []
        for one in requests:
            if "request_range" in one:
                responses.append({"response_range": self._range(one["request_range"])})
            elif "request_put" in one:
                self._put(one["request_put"], body)
                responses.append({"response_put": {}})
            else:
                facts = one["request_delete_range"]
                for key in self._matching(facts):
                    del self.keys[key]
                responses.append({"response_delete_range": {}})
        return self._headed({"responses": responses} | ({"succeeded": True} if holds else {}))

    def _put(self, facts: Json, body: Json) -> None:
        key, before = decoded(facts["key"]), self.keys.get(decoded(facts["key"]))
        created = self.revision if before is None else before.created
        self.keys[key] = Kept(decoded(facts["value"]), created, self.revision, facts.get("lease", ""))
        if "lease" not in facts:
            self.landed.append((int(body["compare"][0]["create_revision"]), key))

    def _compare(self, facts: Json) -> bool:
        kept = self.keys.get(decoded(facts["key"]))
        if facts["target"] == "CREATE":
            return (0 if kept is None else kept.created) == int(facts["create_revision"])
        assert facts["target"] == "MOD"
        return (0 if kept is None else kept.changed) == int(facts["mod_revision"])

    def _matching(self, facts: Json) -> list[bytes]:
        start, end = decoded(facts["key"]), decoded(facts.get("range_end", ""))
        return sorted(key for key in self.keys if (start <= key < end if end else key == start))

    def _range(self, facts: Json) -> Json:
        matching = self._matching(facts)
        limit = int(facts.get("limit", 0)) or len(matching)
        answer: Json = {"count": str(len(matching))}
        if matching:
            answer["kvs"] = [self._shown(key, facts) for key in matching[:limit]]
        if len(matching) > limit:
            answer["more"] = True
        return answer

    def _shown(self, key: bytes, facts: Json) -> Json:
        kept = self.keys[key]
        shown = {"key": coded(key), "create_revision": str(kept.created), "mod_revision": str(kept.changed)}
        if kept.lease:
            shown["lease"] = kept.lease
        return shown if facts.get("keys_only") else shown | {"value": coded(kept.value)}

    def _headed(self, answer: Json) -> Json:
        return {"header": {"revision": str(self.revision)}, **answer}

    def _expire(self) -> None:
        now = asyncio.get_running_loop().time()
        for lease in [lease for lease, (_, end) in self.leases.items() if end <= now]:
            self._end(lease)

    def _end(self, lease: str) -> None:
        self.leases.pop(lease, None)
        gone = [key for key, kept in self.keys.items() if kept.lease == lease]
        self.revision += bool(gone)
        for key in gone:
            del self.keys[key]


class FakeCalls:
    """The requests of one master. Each suffers a fault with probability `faults`; `cut` lets none through."""

    def __init__(self, etcd: FakeEtcd, seed: int = 0, faults: float = 0.0, delay_s: float = 0.01) -> None:
        self.etcd = etcd
        self.faults = faults
        self.cut = False
        self.delay_s = delay_s
        self._random = random.Random(seed)
        #: Faults for the next requests, by name, before chance decides.
        self.next: list[str] = []

    async def call(self, path: str, body: Json, timeout_s: float) -> Json:
        kinds = ("before", "after", "late", "twice")
        fault = self._random.choice(kinds) if self._random.random() < self.faults else ""
        if self.next:
            fault = self.next.pop(0)
        if self.cut or fault == "before":
            await asyncio.sleep(min(self.delay_s, timeout_s))
            raise EtcdUnreachable("no answer")
        if fault in ("late", "twice"):
            asyncio.get_running_loop().call_later(self._random.uniform(0.1, 30.0), self._late, path, body)
        if fault == "late":
            await asyncio.sleep(timeout_s)
            raise EtcdUnreachable("no answer in time")
        await asyncio.sleep(self.delay_s)
        answer = self.etcd.execute(path, body)
        if fault == "after":
            raise EtcdUnreachable("the answer was lost")
        return answer

    def _late(self, path: str, body: Json) -> None:
        try:
            self.etcd.execute(path, body)
        except EtcdRefused:
            pass

    async def close(self) -> None:
        pass
