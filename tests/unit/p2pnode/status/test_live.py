"""The feed of the dashboard: one look a second, the same bytes for all readers, a bound on the peers, and an end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from p2pnode.config.settings import Config
from p2pnode.status.live import PERIOD_S, LiveFeed, shown
from p2pnode.status.schema import PeerStatus, Status
from tests.harness.environment.simulated import VirtualClock
from tests.harness.environment.virtual_loop import run
from tests.process.harness.fake_node import PEER, STATUS, FakeSource


class Source(FakeSource):
    """Counts looks; its step rises by one with each."""

    def __init__(self) -> None:
        super().__init__(Config())
        self.looks = 0
        self.peer_lists = 0
        self.fails = False

    def status(self) -> Status:
        self.looks += 1
        if self.fails:
            raise ZeroDivisionError
        return msgspec.structs.replace(STATUS, step=self.looks)

    def peers(self) -> list[PeerStatus]:
        self.peer_lists += 1
        return [PEER]


def fed(scenario: Callable[[Source, LiveFeed], Awaitable[None]]) -> None:
    """Run a scenario against a feed on the virtual clock."""

    async def main() -> None:
        source = Source()
        feed = LiveFeed(source, VirtualClock())
        feed.start()
        try:
            await scenario(source, feed)
        finally:
            await feed.stop()
            await feed.stop()

    run(main(), limit_s=600)


def test_it_looks_once_a_second_and_encodes_nothing_without_a_reader() -> None:
    """A minute has sixty rows, whether or not someone reads; the list of peers is made for readers alone."""

    async def scenario(source: Source, feed: LiveFeed) -> None:
        await asyncio.sleep(60 * PERIOD_S - 0.5)
        history = feed.history()
        assert source.looks == len(history.times) == 60
        assert source.peer_lists == 0
        steps = history.series["step"]
        assert list(steps) == [float(number) for number in range(1, 61)]
        assert all(
            later - earlier == pytest.approx(1.0, abs=0.02)
            for earlier, later in zip(history.times, history.times[1:], strict=False)
        )

    fed(scenario)


def test_all_readers_get_the_same_bytes() -> None:
    """Ten readers cost one look and one encoding; each message has status, peers and the newest row."""

    async def scenario(source: Source, feed: LiveFeed) -> None:
        await asyncio.sleep(0.5)
        messages = await asyncio.gather(*(feed.next() for _ in range(10)))
        assert source.peer_lists == 1
        assert all(message is messages[0] for message in messages)
        update = json.loads(messages[0] or b"")
        assert (update["schema"], update["status"]["step"], update["peers_known"]) == (1, 2, 1)
        assert update["sample"]["step"] == 2
        assert json.loads(feed.now())["sample"] == {}

    fed(scenario)


def test_a_reader_that_goes_leaves_nothing_behind() -> None:
    """A cancelled reader is forgotten, and the next look encodes nothing."""

    async def scenario(source: Source, feed: LiveFeed) -> None:
        reader = asyncio.create_task(feed.next())
        await asyncio.sleep(0.1)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await asyncio.sleep(3.0)
        assert source.peer_lists == 0

    fed(scenario)


def test_the_end_reaches_every_reader() -> None:
    """Readers that wait get None when the node ends, and so do those that come later."""

    async def scenario(_: Source, feed: LiveFeed) -> None:
        readers = [asyncio.create_task(feed.next()) for _ in range(3)]
        await asyncio.sleep(0.1)
        await feed.stop()
        assert await asyncio.gather(*readers) == [None] * 3
        assert await feed.next() is None

    fed(scenario)


def test_a_fault_of_looks_is_logged_once_and_the_next_one_follows(caplog: pytest.LogCaptureFixture) -> None:
    """The dashboard misses seconds, and nothing else happens; the same fault after a good look is another one."""

    async def scenario(source: Source, feed: LiveFeed) -> None:
        for _ in range(2):
            source.fails = True
            await asyncio.sleep(60.0)
            source.fails = False
            await asyncio.sleep(2.0)
        assert len(feed.history().times) >= 2

    fed(scenario)
    assert [record.message for record in caplog.records] == ["the node's figures cannot be read"] * 2


def peers(count: int) -> list[PeerStatus]:
    return [msgspec.structs.replace(PEER, id=f"{number:040x}", step=1000 - number) for number in range(count)]


@pytest.mark.parametrize("count", [0, 1, 49, 50])
def test_few_peers_are_all_shown(count: int) -> None:
    """Up to the limit nothing is left out."""
    assert shown(peers(count), 50, "") == peers(count)


@pytest.mark.parametrize("waited_for", [0, 1, 77, 500, 998, 999])
def test_of_many_peers_evenly_spread_ones_are_shown(waited_for: int) -> None:
    """Exactly the limit, in order, with both ends and whoever is waited for; the quartiles are those of all."""
    every = peers(1000)
    found = shown(every, 50, every[waited_for].id)

    assert len(found) == 50
    assert found == sorted(found, key=lambda peer: -peer.step)
    assert every[waited_for] in found
    assert (found[0], found[-1]) == (every[0], every[-1])
    for quarter in (1, 2, 3):
        assert found[quarter * 50 // 4].step == pytest.approx(every[quarter * 250].step, abs=25)
