"""Peers stored on disk: written soon, one address each, and read whatever the file contains."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.bootstrap.peer_store import (
    FULL_WRITE_INTERVAL_S,
    MAX_AGE_S,
    MAX_STORED,
    PEERS_FILE,
    WRITE_INTERVAL_S,
    PeerStore,
)
from p2pnode.overlay.peers import Activity, Contact, Peer
from tests.harness.environment.simulated import InlineExecutor, MemoryDisk, make_environment
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.unit.training.files.test_checkpoint import Lines


class WallClock:
    """A clock that the test sets."""

    now = 1_700_000_000.0

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


def peer(number: int, port: int = 0) -> Peer:
    """Peer number `number`, at its own port unless one is given."""
    return Peer(
        contact=Contact(number.to_bytes(20, "big"), Address("10.0.0.1", port or 1000 + number)),
        incarnation=1,
        boot_id=1,
        activity=Activity.READY,
        step=0,
        step_seconds=0.0,
        samples=0,
        eligible=True,
        last_heard=0.0,
        last_progress=0.0,
    )


def memory(disk: MemoryDisk, clock: WallClock | None = None) -> tuple[PeerStore, Lines]:
    log = Lines()
    found = PeerStore(make_environment(clock=clock or WallClock(), disk=disk, log=log))
    found.load()
    return found, log


def written(store: PeerStore) -> None:
    run(store.write())


def ports(found: PeerStore) -> list[int]:
    return [address.port for address in found.addresses()]


def test_stored_peers_survive_a_restart() -> None:
    """The most recently seen come first; peers not seen for two weeks are removed."""
    disk, clock = MemoryDisk(), WallClock()
    first, _ = memory(disk, clock)
    first.add_live([peer(1)])
    clock.now += 60.0
    first.add_live([peer(2)])
    written(first)

    assert ports(memory(disk, clock)[0]) == [1002, 1001]

    clock.now += MAX_AGE_S - 30.0
    later, _ = memory(disk, clock)
    later.add_live([])
    assert ports(later) == [1002]


def test_a_peer_that_moved_is_stored_at_its_new_address() -> None:
    """A node that was started again on another port is one peer, not two."""
    disk = MemoryDisk()
    first, _ = memory(disk)
    first.add_live([peer(1), peer(2)])
    written(first)
    again, _ = memory(disk)
    again.add_live([peer(1, port=9001)])

    assert sorted(ports(again)) == [1002, 9001]


def test_it_is_written_soon_until_it_is_full() -> None:
    """A swarm that ran for seconds is stored; a large one, whose peers come and go, causes few writes."""
    found, _ = memory(MemoryDisk())
    found.add_live(peer(number) for number in range(MAX_STORED - 1))
    assert found.write_interval_s == WRITE_INTERVAL_S
    found.add_live(peer(number) for number in range(MAX_STORED + 9))
    assert found.write_interval_s == FULL_WRITE_INTERVAL_S
    assert len(found.addresses()) == MAX_STORED


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"{",
        b"[]",
        b'{"peers": 3}',
        b'{"peers": [3]}',
        b'{"peers": [{"address": "10.0.0.1:1", "met": null}]}',
        b'{"peers": [{"address": "10.0.0.1:1", "met": 1, "id": 7}]}',
        b'{"peers": [{"address": "10.0.0.1:1", "met": 1, "id": "xy"}]}',
        b'{"peers": [{"address": "nowhere", "met": 1}]}',
        b'{"peers": [{"address": "10.0.0.1:1", "met": 1}]}',
    ],
)
def test_a_damaged_file_is_logged_and_replaced(junk: bytes) -> None:
    """Unreadable entries are left out and logged; the next write replaces the file."""
    disk = MemoryDisk()
    disk.write(PEERS_FILE, junk)
    found, log = memory(disk)

    assert [event for event, _ in log.lines] == ["remembered_peers_unreadable"]
    found.add_live([peer(1)])
    written(found)
    assert ports(memory(disk)[0]) == [1001]


@run_by(run)
async def test_the_file_is_written_off_the_loop() -> None:
    """The write, which is synced to disk, goes to the executor; nothing is written on the loop's own thread."""
    disk = MemoryDisk()

    class Kept(InlineExecutor):
        """Keeps the work until the test lets it go."""

        gate = asyncio.Event()

        async def run(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            await self.gate.wait()
            return await super().run(function, *args, **kwargs)

    executor = Kept()
    store = PeerStore(make_environment(clock=WallClock(), disk=disk, executor=executor))
    store.add_live([peer(1)])
    writing = asyncio.create_task(store.write())
    await asyncio.sleep(1.0)
    assert disk.writes == 0
    executor.gate.set()
    await writing
    assert disk.writes == 1
