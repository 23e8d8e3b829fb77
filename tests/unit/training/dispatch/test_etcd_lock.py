"""The lock of the one writer: who holds it, for how long by its own clock, and what it says when it is lost.

With a store on it, and with lost, late and doubled requests: test_etcd_store.py."""

from __future__ import annotations

import asyncio

import pytest

from p2pnode.training.dispatch.etcd_gateway import EtcdRefused, coded
from p2pnode.training.dispatch.etcd_lock import MARGIN, EtcdLock
from p2pnode.training.dispatch.store import StoreLost
from tests.harness.environment.simulated import ListLog, SeededEntropy, make_environment
from tests.harness.environment.virtual_loop import run
from tests.harness.stubs.fake_etcd import FakeCalls, FakeEtcd

KEY, TTL_S = b"/lock", 9.0


def lock_of(etcd: FakeEtcd, name: bytes = b"one") -> tuple[EtcdLock, FakeCalls, ListLog]:
    calls, log = FakeCalls(etcd), ListLog([])
    environment = make_environment(entropy=SeededEntropy(name.decode()), log=log)
    return EtcdLock(calls, KEY, name, environment, TTL_S), calls, log


def test_a_lock_that_was_never_held_is_not() -> None:
    """The error says so."""

    async def scenario() -> None:
        lock, _, _ = lock_of(FakeEtcd())
        with pytest.raises(StoreLost, match="does not hold the lock in etcd: the lock was never held"):
            lock.check()
        assert lock.fence == 0
        await lock.release()

    run(scenario())


def test_the_holder_renews_and_others_wait_for_it() -> None:
    """For as long as it lives; the log of the waiting one names the holder once, and its fence is higher."""

    async def scenario() -> None:
        etcd = FakeEtcd()
        first, _, _ = lock_of(etcd)
        second, _, log = lock_of(etcd, b"two")
        await first.campaign()
        waiting = asyncio.create_task(second.campaign())
        await asyncio.sleep(20 * TTL_S)
        first.check()
        assert not waiting.done()
        assert [one.fields["reason"] for one in log.of("dispatch_master_waits")] == ["one is the master"]
        await first.release()
        await waiting
        second.check()
        assert 0 < first.fence < second.fence
        with pytest.raises(StoreLost, match="it was given up"):
            first.check()
        await second.release()

    run(scenario())


def test_a_holder_that_cannot_renew_stops_a_tenth_before_its_lease_ends() -> None:
    """Its clock counts from when the last renewal was sent. It stays lost, though etcd is there again."""

    async def scenario() -> None:
        lock, calls, log = lock_of(FakeEtcd())
        await lock.campaign()
        loop, began_s = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        calls.cut = True
        while lock.left_s > 0:
            lock.check()
            await asyncio.sleep(0.1)
        assert loop.time() - began_s <= TTL_S * (1 - MARGIN) + 0.1
        with pytest.raises(StoreLost, match="not renewed in time"):
            lock.check()
        calls.cut = False
        await asyncio.sleep(TTL_S)
        with pytest.raises(StoreLost, match="not renewed in time"):
            lock.check()
        assert log.of("dispatch_lock_not_renewed")
        await lock.release()

    run(scenario())


@pytest.mark.parametrize("how", ["ended", "refused"])
def test_a_lease_that_etcd_does_not_have_any_more_is_lost(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the next renewal; the reason is etcd's where it has one."""

    async def scenario() -> None:
        etcd = FakeEtcd()
        lock, calls, _ = lock_of(etcd)
        await lock.campaign()
        if how == "ended":
            etcd.leases.clear()
        else:

            async def refuse(*_: object) -> None:
                raise EtcdRefused(5, "requested lease not found")

            monkeypatch.setattr(calls, "call", refuse)
        await asyncio.sleep(TTL_S / 3 + 0.1)
        with pytest.raises(StoreLost, match="its lease has ended" if how == "ended" else "lease not found"):
            lock.check()
        await lock.release()

    run(scenario())


def test_the_first_reason_stays() -> None:
    """What comes after it follows from it."""

    async def scenario() -> None:
        lock, _, _ = lock_of(FakeEtcd())
        await lock.campaign()
        assert "first" in str(lock.lose("first"))
        assert "first" in str(lock.lose("second"))
        await lock.release()
        with pytest.raises(StoreLost, match="first"):
            lock.check()

    run(scenario())


def test_every_write_is_bound_to_this_holding_of_the_lock() -> None:
    """By the revision that created its key: another holding has another one."""

    async def scenario() -> None:
        lock, _, _ = lock_of(FakeEtcd())
        await lock.campaign()
        assert lock.compare() == {
            "key": coded(KEY),
            "target": "CREATE",
            "result": "EQUAL",
            "create_revision": str(lock.fence),
        }
        assert lock.request_s == TTL_S / 3
        await lock.release()

    run(scenario())


def test_an_unreachable_etcd_is_waited_for() -> None:
    """The reason is logged once; the lock is taken as soon as etcd answers."""

    async def scenario() -> None:
        lock, calls, log = lock_of(FakeEtcd())
        calls.cut = True
        waiting = asyncio.create_task(lock.campaign())
        await asyncio.sleep(30.0)
        assert [one.fields["reason"] for one in log.of("dispatch_master_waits")] == ["no answer"]
        calls.cut = False
        async with asyncio.timeout(2.0):
            await waiting
        lock.check()
        await lock.release()

    run(scenario())
