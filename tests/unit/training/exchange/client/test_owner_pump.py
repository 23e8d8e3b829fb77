"""What waits for shards is sent to their owners: one request per shard, and a rest after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from overlay.peers import Contact
from overlay.transport import TransportError
from tests.harness.builders.stores import contact, store_of
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.exchange_context import ScriptedSwarm, context_of
from training.exchange.shard_tasks import FIRST_RETRY_S, MAX_RETRY_S, REQUESTS_AT_ONCE, OwnerPump

OWNER, OTHER = contact("b"), contact("c")


class Directory:
    """Owners by shard; keeps what it was told."""

    def __init__(self, owners: dict[int, Contact]) -> None:
        self.owners = owners
        self.failures: list[bytes] = []
        self.refreshed: list[list[int]] = []

    def by_owner(self, shards: list[int]) -> tuple[list[tuple[Contact, list[int]]], list[int]]:
        groups: dict[bytes, tuple[Contact, list[int]]] = {}
        for shard in shards:
            if (owner := self.owners.get(shard)) is not None:
                groups.setdefault(owner.node_id, (owner, []))[1].append(shard)
        return list(groups.values()), [shard for shard in shards if shard not in self.owners]

    def failed(self, owner: Contact, error: TransportError) -> None:
        self.failures.append(owner.node_id)

    async def refresh(self, shards: list[int]) -> None:
        self.refreshed.append(shards)


class Bench:
    """A pump whose requests take `request_s`, and of whose shards `unanswered` are asked for again."""

    def __init__(self, owners: dict[int, Contact], *, request_s: float = 0.05) -> None:
        self.directory = Directory(owners)
        self.waiting: dict[int, None] = {}
        self.sent: list[tuple[float, str, list[int]]] = []
        self.unanswered: Callable[[], bool] = lambda: False
        self.error: TransportError | None = None
        self.under_way = self.most = 0
        self._request_s = request_s
        context: Any = context_of(ScriptedSwarm(contact("a"), [OWNER, OTHER]), store_of("a"))
        self.pump = OwnerPump(context, self.directory, lambda: list(self.waiting), self._send)  # type: ignore[arg-type]

    def want(self, *shards: int) -> None:
        self.waiting |= dict.fromkeys(shards)
        self.pump.wake()

    async def _send(self, owner: Contact, shards: list[int]) -> list[int]:
        self.sent.append((asyncio.get_running_loop().time(), chr(owner.address.port), list(shards)))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await asyncio.sleep(self._request_s)
        finally:
            self.under_way -= 1
        if self.error is not None:
            raise self.error
        if self.unanswered():
            return shards
        for shard in shards:
            self.waiting.pop(shard, None)
        return []

    def starts_s(self) -> list[float]:
        return [at_s for at_s, _, _ in self.sent]


def test_shards_of_one_owner_go_in_one_request() -> None:
    """One request to each owner; where nothing waits nothing is sent."""

    async def scenario() -> None:
        bench = Bench({0: OWNER, 1: OTHER, 2: OWNER})
        bench.pump.wake()
        await asyncio.sleep(0.1)
        assert bench.sent == []
        bench.want(0, 1, 2)
        await asyncio.sleep(1.0)
        assert sorted((name, shards) for _, name, shards in bench.sent) == [("b", [0, 2]), ("c", [1])]
        assert bench.waiting == {}
        assert list(bench.pump.busy) == []
        await bench.pump.stop()

    run(scenario())


def test_a_shard_has_one_request_at_a_time() -> None:
    """What comes for it meanwhile goes with the next one."""

    async def scenario() -> None:
        bench = Bench({0: OWNER}, request_s=1.0)
        bench.want(0)
        await asyncio.sleep(0.5)
        for _ in range(5):
            bench.want(0)
            await asyncio.sleep(0.05)
        assert len(bench.sent) == 1
        await asyncio.sleep(1.0)
        assert bench.most == 1
        await bench.pump.stop()

    run(scenario())


def test_an_owner_has_few_requests_at_once() -> None:
    """The others begin as those before have ended, and every shard is sent once."""

    async def scenario() -> None:
        bench = Bench(dict.fromkeys(range(8), OWNER), request_s=1.0)
        for shard in range(8):
            bench.want(shard)
            await asyncio.sleep(0.05)
        assert bench.most == REQUESTS_AT_ONCE
        await asyncio.sleep(5.0)
        assert bench.most == REQUESTS_AT_ONCE
        assert sorted(shard for _, _, shards in bench.sent for shard in shards) == list(range(8))
        await bench.pump.stop()

    run(scenario())


def test_a_failed_request_is_sent_again_after_rests_that_grow() -> None:
    """The owner is reported, and asked about, each time; rests double up to their limit, and begin anew after an
    answer."""

    async def scenario() -> None:
        bench = Bench({0: OWNER}, request_s=0.0)
        bench.error = TransportError("timeout", OWNER.address, "no answer")
        bench.want(0)
        await asyncio.sleep(5.0)
        starts = bench.starts_s()
        rests = [later - earlier for earlier, later in pairwise(starts)]
        assert all(
            0.5 * wanted - 1e-9 <= rest <= 1.5 * wanted + 1e-9 for rest, wanted in zip(rests, grown(), strict=False)
        )
        assert len(bench.directory.failures) >= len(bench.directory.refreshed) > 8
        assert set(bench.directory.failures) == {OWNER.node_id}
        assert bench.directory.refreshed[0] == [0]

        bench.error = None
        await asyncio.sleep(1.0)
        assert bench.waiting == {}
        bench.error = TransportError("timeout", OWNER.address, "no answer")
        before = len(bench.sent)
        bench.want(0)
        await asyncio.sleep(1.5 * FIRST_RETRY_S + 0.001)
        assert len(bench.sent) >= before + 2
        await bench.pump.stop()

    run(scenario())


def grown() -> list[float]:
    """The rests without their jitter."""
    rests, rest_s = [], FIRST_RETRY_S
    for _ in range(40):
        rests.append(rest_s)
        rest_s = min(2 * rest_s, MAX_RETRY_S)
    return rests


def test_a_shard_that_was_not_answered_rests_alone() -> None:
    """The others of its request are free at once."""

    async def scenario() -> None:
        bench = Bench({0: OWNER, 1: OWNER}, request_s=0.01)
        bench.unanswered = lambda: True
        bench.want(0)
        await asyncio.sleep(0.0105)
        assert list(bench.pump.busy) == [0]
        bench.unanswered = lambda: False
        bench.want(1)
        await asyncio.sleep(0.002)
        assert [shards for _, _, shards in bench.sent][-1] == [1]
        await asyncio.sleep(1.0)
        assert bench.waiting == {}
        assert bench.directory.failures == []
        await bench.pump.stop()

    run(scenario())


def test_a_shard_without_a_known_owner_is_looked_for_and_then_sent() -> None:
    """It takes no request meanwhile."""

    async def scenario() -> None:
        bench = Bench({})
        bench.want(3)
        await asyncio.sleep(0.1)
        assert bench.sent == []
        assert bench.directory.refreshed[0] == [3]
        bench.directory.owners[3] = OWNER
        await asyncio.sleep(MAX_RETRY_S * 1.5)
        assert [(name, shards) for _, name, shards in bench.sent] == [("b", [3])]
        await bench.pump.stop()

    run(scenario())
