"""The store in etcd against one in memory: lost, late and repeated requests, a lost lock, and what is left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from p2pnode.training.dispatch import etcd_store
from p2pnode.training.dispatch.etcd_gateway import EtcdRefused, EtcdUnreachable
from p2pnode.training.dispatch.etcd_store import EtcdStore
from p2pnode.training.dispatch.store import MAX_BYTES, MAX_ROWS, StoreLost
from tests.harness.environment.simulated import ListLog, SeededEntropy, make_environment
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import played_by
from tests.harness.stubs.fake_etcd import FakeCalls, FakeEtcd

TTL_S = 10.0


def master(etcd: FakeEtcd, name: str = "one", log: ListLog | None = None) -> tuple[EtcdStore, FakeCalls]:
    calls = FakeCalls(etcd)
    environment = make_environment(entropy=SeededEntropy(name), log=log or ListLog([]))
    return EtcdStore(calls, "/test", name, environment, TTL_S), calls  # type: ignore[arg-type]


def simulate(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run(scenario(), strict=True)


async def read(etcd: FakeEtcd) -> dict[str, bytes]:
    """What the next master reads."""
    store, _ = master(etcd, "reader")
    rows = await store.open()
    await store.close()
    return rows


@pytest.mark.parametrize("fault", ["before", "after", "late", "twice"])
@played_by(simulate)
async def test_a_write_is_repeated_until_its_outcome_is_known(*, fault: str) -> None:
    """Every write lands once, although its request or its answer is lost, late or doubled; the late copies change
    nothing."""
    etcd = FakeEtcd()
    store, calls = master(etcd)
    await store.open()
    for number in range(3):
        calls.next = [fault, "", fault]
        await store.write({"a": b"%d" % number, f"b{number}": b""})
    await asyncio.sleep(60)
    await store.write({"c": b"last"})
    await store.close()
    assert await read(etcd) == {"a": b"2", "b0": b"", "b1": b"", "b2": b"", "c": b"last"}


@played_by(simulate)
async def test_a_master_without_etcd_stops_before_its_lease_could_have_ended() -> None:
    """From the moment etcd is cut off the master serves for at most nine tenths of the lease; it is lost to its own
    clock before the key is gone, and a write under way ends with it."""
    for delay_s in (0.0, 1.0, 2.5, 3.2):
        etcd = FakeEtcd()
        store, calls = master(etcd)
        await store.open()
        await asyncio.sleep(20 + delay_s)
        calls.cut = True
        with pytest.raises(StoreLost, match="not renewed in time"):
            await store.write({"a": b"1"})
        etcd._expire()
        assert b"/test/lock" in etcd.keys
        with pytest.raises(StoreLost):
            store.check()
        await store.close()
        assert etcd.landed == []


@pytest.mark.parametrize("how", ["its lease has ended", "lease not found"])
@played_by(simulate)
async def test_a_lease_that_etcd_has_ended_is_noticed_at_the_next_renewal(
    *, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator revoked the lease: the master stops within a third of its time, though its own clock would go on.
    The reason is etcd's where it has one, and stays."""

    async def refuse(*_: object) -> None:
        raise EtcdRefused(5, "requested lease not found")

    etcd = FakeEtcd()
    store, calls = master(etcd)
    await store.open()
    await asyncio.sleep(20.1)
    etcd._end(store._lock._lease)
    if how == "lease not found":
        monkeypatch.setattr(calls, "call", refuse)
    for wait_s in (TTL_S / 3 + 0.1, TTL_S):
        await asyncio.sleep(wait_s)
        with pytest.raises(StoreLost, match=how):
            store.check()
    await store.close()


@played_by(simulate)
async def test_a_refused_write_ends_the_service(*, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an exhausted quota the master serves no more; the next one reads what was written before, and writes when
    there is space."""
    etcd = FakeEtcd()
    store, _ = master(etcd)
    await store.open()
    await store.write({"a": b"1"})
    etcd.full = True
    with pytest.raises(StoreLost, match="space exceeded"):
        await store.write({"a": b"2"})
    with pytest.raises(StoreLost):
        store.check()
    await store.close()
    etcd.full = False
    assert await read(etcd) == {"a": b"1"}


@played_by(simulate)
async def test_rows_are_read_in_pages(*, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many rows as fit into one write come back, the largest write too, and no keys are left beside them."""
    monkeypatch.setattr(etcd_store, "PAGE", 3)
    etcd = FakeEtcd()
    store, _ = master(etcd)
    await store.open()
    rows = {f"task/{number}": b"%d" % number for number in range(MAX_ROWS)}
    await store.write(rows)
    large = {"large": random.Random(1).randbytes(MAX_BYTES)}
    await store.write(large)
    await store.close()
    assert await read(etcd) == rows | large
    assert len(etcd.keys) == MAX_ROWS + 2


@played_by(simulate)
async def test_an_unreachable_etcd_is_waited_for_in_a_campaign() -> None:
    """A master that starts before etcd does begins to serve when it answers; the log says once why it waits."""
    log = ListLog([])
    store, calls = master(FakeEtcd(), log=log)
    calls.cut = True
    with pytest.raises(EtcdUnreachable):
        await calls.call("kv/range", {}, 1.0)
    opening = asyncio.create_task(store.open())
    await asyncio.sleep(300)
    assert not opening.done()
    assert [one.fields["reason"] for one in log.of("dispatch_master_waits")] == ["no answer"]
    calls.cut = False
    async with asyncio.timeout(2):
        await opening
    await store.close()


@pytest.mark.parametrize("fault", ["before", "after", "late", "twice"])
@played_by(simulate)
async def test_a_campaign_survives_lost_answers(*, fault: str) -> None:
    """A master whose request for a lease, or for the lock, suffered is the master in the end, and one alone."""
    for place in range(3):
        etcd = FakeEtcd()
        store, calls = master(etcd)
        calls.next = [""] * place + [fault]
        # Only a late request keeps others waiting: its lock is nobody's until its lease ends.
        async with asyncio.timeout(3 * TTL_S + 40 if fault == "late" else 3):
            await store.open()
        await store.write({"a": b"1"})
        await asyncio.sleep(35)
        store.check()
        await store.write({"a": b"2"})
        assert {fence for fence, _ in etcd.landed} == {store.epoch}
        await store.close()
