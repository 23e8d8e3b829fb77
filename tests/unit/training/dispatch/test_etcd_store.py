"""The store in etcd against one in memory: lost, late and repeated requests, a lost lock, and what is left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.harness.environment.simulated import SeededEntropy, make_environment
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.fake_etcd import FakeCalls, FakeEtcd
from training.dispatch import etcd_store
from training.dispatch.etcd_gateway import EtcdUnreachable
from training.dispatch.etcd_store import EtcdStore
from training.dispatch.store import MAX_ENTRY_BYTES, StoreLost, StoreRefused

TTL_S = 10.0


def master(etcd: FakeEtcd, name: str = "one") -> tuple[EtcdStore, FakeCalls]:
    calls = FakeCalls(etcd)
    environment = make_environment(entropy=SeededEntropy(name))
    return EtcdStore(calls, "/test", name, environment, TTL_S), calls


def simulate(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run(scenario(), strict=True)


async def read(etcd: FakeEtcd) -> tuple[bytes | None, bytes | None, list[bytes]]:
    """What the next master reads."""
    store, _ = master(etcd, "reader")
    state = await store.open()
    await store.close()
    return state.chunks, state.snapshot, list(state.entries)


@pytest.mark.parametrize("fault", ["before", "after", "late", "twice"])
def test_a_write_is_repeated_until_its_outcome_is_known(fault: str) -> None:
    """Every write of an entry, a part and a head lands once, although its request or its answer is lost, late or
    doubled; the late copies change nothing."""

    async def scenario() -> None:
        etcd = FakeEtcd()
        store, calls = master(etcd)
        await store.open()
        calls.next = [fault]
        await store.append(b"first")
        calls.next = [fault, "", fault]
        await store.write_chunks(b"the chunks")
        calls.next = ["", fault]
        await store.write_snapshot(b"older", 1)
        await store.append(b"second")
        calls.next = [fault]
        await store.write_snapshot(b"newer", 0)
        await asyncio.sleep(60)
        await store.append(b"third")
        await store.close()
        assert await read(etcd) == (b"the chunks", b"newer", [b"second", b"third"])

    simulate(scenario)


@pytest.mark.parametrize("fault", ["before", "after", "late", "twice"])
def test_a_campaign_survives_lost_answers(fault: str) -> None:
    """A master whose request for a lease, or for the lock, suffered is the master in the end, and one alone."""

    async def scenario() -> None:
        for place in range(3):
            etcd = FakeEtcd()
            store, calls = master(etcd)
            calls.next = [""] * place + [fault]
            # Only a late request keeps others waiting: its lock is nobody's until its lease ends.
            async with asyncio.timeout(3 * TTL_S + 40 if fault == "late" else 3):
                await store.open()
            await store.append(b"entry")
            await asyncio.sleep(35)
            store.check()
            await store.append(b"another")
            assert {fence for fence, _ in etcd.landed} == {store.epoch}
            await store.close()

    simulate(scenario)


def test_a_standby_waits_and_takes_over() -> None:
    """While a master renews its lock no other opens; one that gives up is followed at once, a silent one after its
    lease, and the epoch rises each time."""

    async def scenario() -> None:
        etcd = FakeEtcd()
        first, _ = master(etcd, "first")
        second, calls = master(etcd, "second")
        third, _ = master(etcd, "third")
        await first.open()
        waiting = asyncio.create_task(second.open())
        await asyncio.sleep(100)
        assert not waiting.done()
        await first.close()
        async with asyncio.timeout(1.5):
            await waiting
        calls.cut = True
        began = asyncio.get_running_loop().time()
        await third.open()
        took_s = asyncio.get_running_loop().time() - began
        assert TTL_S / 2 < took_s < TTL_S + 2
        assert first.epoch < second.epoch < third.epoch
        with pytest.raises(StoreLost):
            second.check()
        await second.close()
        await third.close()

    simulate(scenario)


def test_a_master_without_etcd_stops_before_its_lease_could_have_ended() -> None:
    """From the moment etcd is cut off the master serves for at most nine tenths of the lease; it is lost to its own
    clock before the key is gone, and a write under way ends with it."""

    async def scenario() -> None:
        for delay_s in (0.0, 1.0, 2.5, 3.2):
            etcd = FakeEtcd()
            store, calls = master(etcd)
            await store.open()
            await asyncio.sleep(20 + delay_s)
            calls.cut = True
            with pytest.raises(StoreLost, match="not renewed in time"):
                await store.append(b"entry")
            etcd._expire()
            assert b"/test/lock" in etcd.keys
            with pytest.raises(StoreLost):
                store.check()
            await store.close()
            assert etcd.landed == []

    simulate(scenario)


def test_a_lease_that_etcd_has_ended_is_noticed_at_the_next_renewal() -> None:
    """An operator revoked the lease: the master stops within a third of its time, though its own clock would go on."""

    async def scenario() -> None:
        etcd = FakeEtcd()
        store, _ = master(etcd)
        await store.open()
        await asyncio.sleep(20.1)
        etcd._end(store._lock._lease)
        await asyncio.sleep(TTL_S / 3 + 0.1)
        with pytest.raises(StoreLost, match="its lease has ended"):
            store.check()
        await store.close()

    simulate(scenario)


def test_a_former_master_cannot_write_though_its_clock_stood_still() -> None:
    """Its requests arrive after another took the lock: none lands, and it knows that it is no longer the master."""

    async def scenario() -> None:
        etcd = FakeEtcd()
        old, calls = master(etcd, "old")
        await old.open()
        await old.append(b"old")
        calls.cut = True
        new, _ = master(etcd, "new")
        await new.open()
        calls.cut = False
        old._lock._until = 1e9
        for write in (old.append(b"bad"), old.write_chunks(b"bad"), old.write_snapshot(b"bad", 1)):
            old._lock._lost = ""
            with pytest.raises(StoreLost, match="another master has taken over"):
                await write
        with pytest.raises(StoreLost):
            old.check()
        await new.append(b"new")
        await old.close()
        await new.close()
        assert await read(etcd) == (None, None, [b"old", b"new"])

    simulate(scenario)


def test_refused_writes_leave_the_store_as_it_was() -> None:
    """An entry above the limit and an exhausted quota are retryable errors; with an unknown outcome before it, the
    store is lost."""

    async def scenario() -> None:
        etcd = FakeEtcd()
        store, calls = master(etcd)
        await store.open()
        with pytest.raises(StoreRefused):
            await store.append(bytes(MAX_ENTRY_BYTES + 1))
        etcd.full = True
        with pytest.raises(StoreRefused, match="space exceeded"):
            await store.append(b"entry")
        etcd.full = False
        await store.append(b"entry")
        etcd.full = True
        calls.next = ["before"]
        with pytest.raises(StoreLost, match="unknown outcome"):
            await store.append(b"unknown")
        await store.close()
        etcd.full = False
        assert await read(etcd) == (None, None, [b"entry"])

    simulate(scenario)


def test_large_parts_are_cut_and_old_ones_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts above etcd's limit come back; after each snapshot, and after a master that died within one, only what the
    head names is left."""
    monkeypatch.setattr(etcd_store, "PAGE", 3)

    async def scenario() -> None:
        etcd = FakeEtcd()
        store, _ = master(etcd)
        await store.open()
        large = random.Random(1).randbytes(3 << 20)
        await store.write_chunks(large)
        for number in range(20):
            await store.append(b"%d" % number)
        for _ in range(3):
            await store.write_snapshot(large[::-1], 4)
        assert len(etcd.keys) == 2 * 12 + 8 + 2  # with the lock
        dying = asyncio.create_task(store.write_snapshot(large, 4))
        await asyncio.sleep(0.035)  # some pieces are written, the head is not
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)
        await store.close()
        assert len(etcd.keys) > 2 * 12 + 8 + 1
        assert await read(etcd) == (large, large[::-1], [b"%d" % number for number in range(12, 20)])
        assert len(etcd.keys) == 2 * 12 + 8 + 1

    simulate(scenario)


def test_a_damaged_store_is_refused_by_name() -> None:
    """A missing or changed entry, a missing piece, an unreadable head, a newer format: the error names the key."""

    async def scenario() -> None:
        async def damaged(damage: Callable[[FakeEtcd], None], reason: str) -> None:
            etcd = FakeEtcd()
            store, _ = master(etcd)
            await store.open()
            await store.write_chunks(b"chunks")
            for number in range(3):
                await store.append(b"%d" % number)
            await store.close()
            damage(etcd)
            store, _ = master(etcd)
            with pytest.raises(StoreLost, match=reason):
                await store.open()
            await store.close()

        def change(name: str, value: bytes) -> Callable[[FakeEtcd], None]:
            def act(etcd: FakeEtcd) -> None:
                next(kept for key, kept in etcd.keys.items() if name.encode() in key).value = value

            return act

        await damaged(lambda etcd: etcd.keys.pop(b"/test/log/0000000000000002"), "entry 2 of /test/log is missing")
        await damaged(change("log/0000000000000001", b"\0\0\0\0x"), "wrong checksum")
        await damaged(change("parts/", b"chunkz"), "not what was written")
        await damaged(change("head", b"{"), "/test/head in etcd cannot be read")
        await damaged(change("head", b'{"format":2}'), "has format 2")

    simulate(scenario)


def test_an_unreachable_etcd_is_waited_for_in_a_campaign() -> None:
    """A master that starts before etcd does begins to serve when it answers."""

    async def scenario() -> None:
        store, calls = master(FakeEtcd())
        calls.cut = True
        with pytest.raises(EtcdUnreachable):
            await calls.call("kv/range", {}, 1.0)
        opening = asyncio.create_task(store.open())
        await asyncio.sleep(300)
        assert not opening.done()
        calls.cut = False
        async with asyncio.timeout(2):
            await opening
        await store.close()

    simulate(scenario)
