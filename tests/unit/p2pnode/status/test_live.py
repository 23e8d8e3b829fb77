"""The feed of the dashboard: one look a second for all readers; and the run so far, thinned and true."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pnode.config.settings import Config
from p2pnode.status.live import METRICS, PERIOD_S, ROWS, History, LiveFeed, shown
from p2pnode.status.schema import PeerStatus, Status
from tests.harness.environment.simulated import VirtualClock
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import played_by
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


@played_by(fed)
async def test_it_looks_once_a_second_and_encodes_nothing_without_a_reader(source: Source, feed: LiveFeed) -> None:
    """A minute has sixty rows, whether or not someone reads; the list of peers is made for readers alone."""
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


@played_by(fed)
async def test_all_readers_get_the_same_bytes(source: Source, feed: LiveFeed) -> None:
    """Ten readers cost one look and one encoding; each message has status, peers and the newest row."""
    await asyncio.sleep(0.5)
    messages = await asyncio.gather(*(feed.next() for _ in range(10)))
    assert source.peer_lists == 1
    assert all(message is messages[0] for message in messages)
    update = json.loads(messages[0] or b"")
    assert (update["schema"], update["status"]["step"], update["peers_known"]) == (1, 2, 1)
    assert update["sample"]["step"] == 2
    assert json.loads(feed.now())["sample"] == {}


@played_by(fed)
async def test_a_reader_that_goes_leaves_nothing_behind(source: Source, feed: LiveFeed) -> None:
    """A cancelled reader is forgotten, and the next look encodes nothing."""
    reader = asyncio.create_task(feed.next())
    await asyncio.sleep(0.1)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    await asyncio.sleep(3.0)
    assert source.peer_lists == 0


@played_by(fed)
async def test_the_end_reaches_every_reader(_: Source, feed: LiveFeed) -> None:
    """Readers that wait get None when the node ends, and so do those that come later."""
    readers = [asyncio.create_task(feed.next()) for _ in range(3)]
    await asyncio.sleep(0.1)
    await feed.stop()
    assert await asyncio.gather(*readers) == [None] * 3
    assert await feed.next() is None


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


def status(step: int = 0, **training: Any) -> Status:
    """A status of the fake node with other figures."""
    changed = msgspec.structs.replace(STATUS.training, step_seconds=0.0, **training)
    return msgspec.structs.replace(STATUS, step=step, training=changed)


def filled(looks: int, rows: int = 8) -> History:
    """A history whose step is the time, looked at once a second."""
    history = History(rows)
    for time in range(looks):
        history.look(float(time), status(step=time), [])
    return history


@given(looks=st.integers(1, 200), rows=st.integers(4, 12).map(lambda half: 2 * half))
def test_the_rows_are_bounded_evenly_spread_and_as_they_were(looks: int, rows: int) -> None:
    """At any moment: fewer rows than the bound, the first look among them, equal distances, and the values of looks."""
    history = filled(looks, rows)

    times = history.times.tolist()
    assert 1 <= len(times) < rows
    assert times[0] == 0.0
    assert len({later - earlier for earlier, later in pairwise(times)}) <= 1
    assert history.series["step"].tolist() == times
    assert looks - 1 - times[-1] < 4 * max(1, looks / rows)


def test_until_it_is_full_nothing_is_thinned_and_then_every_second_row_goes() -> None:
    """Of rows of one second: seven are all there, of eight four."""
    assert filled(7).times.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert filled(8).times.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert filled(11).times.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


def test_the_newest_row_is_there_too() -> None:
    """A page that adds rows of each second finds the one before, however far apart those that are kept are."""
    history = filled(12)

    assert history.times.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    times, series = history.kept()
    assert times == series["step"] == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 11.0]
    assert History().kept() == ([], {})


def test_the_memory_of_a_month_is_that_of_a_photograph() -> None:
    """All columns take less than a quarter of a megabyte, however long a node runs."""
    history = filled(3 * ROWS, ROWS)

    assert sum(values.itemsize * len(values) for values in history.series.values()) < 250_000


def test_a_missing_value_is_a_gap_and_so_is_the_time_before_a_column() -> None:
    """Null and infinite values are no zero. A metric that comes later has no values before."""
    history = History()
    history.look(1.0, status(loss=None), [])
    history.look(2.0, status(loss=math.inf, metrics={"accuracy": 0.5}), [])

    assert all(math.isnan(value) for value in history.series["loss"])
    assert math.isnan(history.series["metric:accuracy"][0])
    assert history.series["metric:accuracy"][1] == 0.5


def test_a_look_that_is_not_later_is_left_out() -> None:
    """Two looks at one moment, or a clock that stands still, leave one row: a chart's time only rises."""
    history = History()
    for time in (1.0, 1.0, 0.5, 2.0):
        history.look(time, status(), [])

    assert history.times.tolist() == [1.0, 2.0]


def test_the_seconds_of_steps_are_counted_once_each() -> None:
    """Those that have ended since the first look, by phase."""
    history = History()
    first: Any = {"step": 4, "train_seconds": 100.0}
    second: Any = {"step": 5, "train_seconds": 2.0, "push_seconds": 1.0, "wait_seconds": 0.5, "pull_seconds": 0.5}

    assert history.look(1.0, status(step=4), [first])["train_seconds"] == 0.0
    for now in (2.0, 3.0):
        row = history.look(now, status(step=5), [first, second])
        assert [row[f"{phase}_seconds"] for phase in ("train", "push", "wait", "pull")] == [2.0, 1.0, 0.5, 0.5]


def test_the_first_metrics_are_kept_beside_the_loss() -> None:
    """Under their names; a fifth is left out."""
    history = History()
    named = {f"m{number}": float(number) for number in range(METRICS + 1)}

    row = history.look(1.0, status(metrics={"loss": 9.0, **named}), [])

    expected = {f"metric:m{number}": float(number) for number in range(METRICS)}
    assert {name: value for name, value in row.items() if name.startswith("metric")} == expected
    assert {name for name in history.series if name.startswith("metric")} == set(expected)
