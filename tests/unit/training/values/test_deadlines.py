"""Deadlines: each wait has its own time, by one timer; what has ended is not ended again."""

from __future__ import annotations

import asyncio

import pytest

from tests.harness.environment.virtual_loop import run
from training.values.client import Deadlines


def test_each_wait_ends_after_its_time() -> None:
    """Two that begin at other moments end as far apart; one that has a result keeps it; later ones are ended too."""

    async def story() -> None:
        loop = asyncio.get_running_loop()
        began_s, deadlines = loop.time(), Deadlines(10.0)
        waits = [loop.create_future() for _ in range(3)]
        for wait in waits:
            deadlines.begin(wait)
            await asyncio.sleep(1.0)
        waits[1].set_result("done")
        deadlines.end(waits[1])
        with pytest.raises(TimeoutError):
            await waits[0]
        assert loop.time() - began_s == pytest.approx(10.0)
        with pytest.raises(TimeoutError):
            await waits[2]
        assert loop.time() - began_s == pytest.approx(12.0)
        assert waits[1].result() == "done"
        await asyncio.sleep(100.0)
        late = loop.create_future()
        deadlines.begin(late)
        with pytest.raises(TimeoutError):
            await late
        assert loop.time() - began_s == pytest.approx(122.0)

    run(story())


def test_nothing_is_ended_after_the_stop() -> None:
    """And no timer is left."""

    async def story() -> None:
        wait: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        deadlines = Deadlines(1.0)
        deadlines.begin(wait)
        deadlines.stop()
        await asyncio.sleep(5.0)
        assert not wait.done()

    run(story())
