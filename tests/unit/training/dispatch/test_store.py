"""The store in memory: one writer at a time, leases that end, entries that are too large, and the snapshot."""

from __future__ import annotations

import asyncio

import pytest

from tests.harness.environment.virtual_loop import run
from training.dispatch.store import (
    MAX_ENTRY_BYTES,
    MemoryStore,
    StoreContents,
    StoredQueueState,
    StoreLost,
    StoreRefused,
)


def test_a_new_store_is_empty_and_what_is_written_is_found_by_the_next() -> None:
    """Chunks, snapshot, and the entries after the snapshot, in their order."""

    async def main() -> None:
        contents = StoreContents()
        first = MemoryStore(contents)
        assert await first.open() == StoredQueueState(None, None, ())
        await first.write_chunks(b"chunks")
        for entry in (b"1", b"2", b"3"):
            await first.append(entry)
        await first.write_snapshot(b"snapshot", 2)
        await first.append(b"4")
        await first.close()

        second = MemoryStore(contents)
        assert await second.open() == StoredQueueState(b"chunks", b"snapshot", (b"3", b"4"))
        assert second.epoch > 1

    run(main())


def test_the_newest_master_is_the_one_writer() -> None:
    """Without a lease, whoever opens the store last has it; the one before is told at its next call."""

    async def main() -> None:
        contents = StoreContents()
        first, second = MemoryStore(contents), MemoryStore(contents)
        await first.open()
        await second.open()
        second.check()
        with pytest.raises(StoreLost, match="another master"):
            first.check()
        for write in (first.append(b"x"), first.write_chunks(b"x"), first.write_snapshot(b"x", 0)):
            with pytest.raises(StoreLost):
                await write
        await first.close()
        second.check()
        assert (contents.chunks, contents.snapshot, contents.entries, contents.epoch) == (None, None, [], 2)

    run(main())


def test_a_store_that_was_not_opened_is_not_written() -> None:
    """Nor one that was closed."""

    async def main() -> None:
        store = MemoryStore(StoreContents(epoch=3))
        with pytest.raises(StoreLost):
            await store.append(b"x")
        await store.open()
        await store.append(b"x")
        await store.close()
        await store.close()
        with pytest.raises(StoreLost):
            store.check()

    run(main())


def test_a_lease_is_waited_for_and_a_check_renews_it() -> None:
    """The next master has the store as soon as the lease of the former one has ended, or was given up."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        contents = StoreContents()
        first, second, third = (MemoryStore(contents, lease_s=10.0) for _ in range(3))
        await first.open()
        opening = asyncio.create_task(second.open())
        await asyncio.sleep(6.0)
        first.check()
        await opening
        assert loop.time() - began_s == pytest.approx(16.0)

        opening = asyncio.create_task(third.open())
        await asyncio.sleep(1.0)
        await first.close()  # the lease is not its own any more
        assert contents.held_until > loop.time()
        await second.close()
        await opening
        assert loop.time() - began_s == pytest.approx(26.0)
        await MemoryStore(contents).open()

    run(main())


def test_a_lease_that_has_ended_is_lost_though_nobody_took_it() -> None:
    """A master that was away for longer than its lease does not write on."""

    async def main() -> None:
        store = MemoryStore(lease_s=10.0)
        await store.open()
        await asyncio.sleep(10.0)
        with pytest.raises(StoreLost, match="lease on the store has ended"):
            await store.append(b"x")
        assert store.contents.entries == []

    run(main())


def test_an_entry_larger_than_allowed_is_refused_and_the_store_stays() -> None:
    """The largest one is taken."""

    async def main() -> None:
        store = MemoryStore()
        await store.open()
        with pytest.raises(StoreRefused, match=f"{MAX_ENTRY_BYTES + 1} bytes is larger than {MAX_ENTRY_BYTES}"):
            await store.append(bytes(MAX_ENTRY_BYTES + 1))
        await store.append(bytes(MAX_ENTRY_BYTES))
        assert len(store.contents.entries) == 1

    run(main())
