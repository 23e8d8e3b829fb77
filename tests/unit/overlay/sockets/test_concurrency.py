"""Limits on concurrent handlers and large heads, in total and per peer."""

from __future__ import annotations

import asyncio

import pytest

from p2pnode.overlay.sockets import concurrency
from p2pnode.overlay.sockets.concurrency import MIN_PLACES, ConnectionPlaces, HandlerLimiter, places_of
from tests.harness.runner.stories import run_by


class Requests:
    """Requests of several peers at one limiter."""

    def __init__(self) -> None:
        self.limiter = HandlerLimiter()
        self.running: list[bytes] = []
        self.end = asyncio.Event()

    def start(self, peer: bytes, count: int = 1) -> list[asyncio.Task[str]]:
        return [asyncio.ensure_future(self._handle(peer)) for _ in range(count)]

    async def _handle(self, peer: bytes) -> str:
        async with self.limiter.handler(peer):
            self.running.append(peer)
            try:
                await self.end.wait()
            finally:
                self.running.remove(peer)
        return "done"


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "MAX_CONCURRENT_HANDLERS", 5)
    monkeypatch.setattr(concurrency, "MAX_HANDLERS_PER_PEER", 3)


@run_by(asyncio.run)
async def test_a_peer_is_limited_and_others_are_served() -> None:
    """Of one peer three requests run and the others wait; another peer's request runs at once."""
    requests = Requests()
    hog = requests.start(b"hog", 7)
    other = requests.start(b"other")
    await settle()
    assert sorted(requests.running) == [b"hog"] * 3 + [b"other"]
    requests.end.set()
    assert await asyncio.gather(*hog, *other) == ["done"] * 8


@run_by(asyncio.run)
async def test_one_that_is_cancelled_while_it_waits_takes_no_place() -> None:
    """Before its turn, and in the moment of its turn: those behind it are served, and all places are free again."""
    for is_its_turn in (False, True):
        requests = Requests()
        running = requests.start(b"peer", 3)
        await settle()
        first, second = requests.start(b"peer", 2)
        await settle()
        if is_its_turn:
            running[0].cancel()
            await asyncio.sleep(0)  # its place has been given to the first in turn, which has not run yet
            first.cancel()
        else:
            first.cancel()
            await settle()
            running[0].cancel()
        await settle()
        assert requests.running == [b"peer"] * 3
        requests.end.set()
        assert await second == "done"
        await asyncio.gather(*running, first, return_exceptions=True)
        requests.end.clear()
        requests.start(b"peer", 3)
        await settle()
        assert len(requests.running) == 3
        requests.end.set()
        await settle()


@run_by(asyncio.run)
async def test_a_place_that_is_free_in_the_moment_of_a_cancellation_goes_to_the_next() -> None:
    """The one that is cancelled has not run since: it still stands in the queue."""
    requests = Requests()
    taken = requests.limiter.handler(b"peer")
    await taken.__aenter__()
    requests.start(b"peer", 2)
    await settle()
    first, second = requests.start(b"peer", 2)
    await settle()
    first.cancel()
    await taken.__aexit__(None, None, None)
    await settle()
    assert len(requests.running) == 3
    requests.end.set()
    assert await second == "done"


@run_by(asyncio.run)
async def test_the_total_is_limited() -> None:
    """Requests of many peers wait for the limit of all."""
    requests = Requests()
    tasks = [task for number in range(8) for task in requests.start(bytes([number + 1]))]
    await settle()
    assert len(requests.running) == 5
    requests.end.set()
    assert await asyncio.gather(*tasks) == ["done"] * 8


@run_by(asyncio.run)
async def test_an_empty_peer_has_no_limit_of_its_own() -> None:
    """Requests over the loopback of an open swarm share only the limit of all."""
    requests = Requests()
    tasks = requests.start(b"", 8)
    await settle()
    assert len(requests.running) == 5
    requests.end.set()
    assert await asyncio.gather(*tasks) == ["done"] * 8


@run_by(asyncio.run)
async def test_cancelled_requests_leave_nothing_behind() -> None:
    """After all requests of a peer were cancelled, running or waiting, it has its full share again."""
    requests = Requests()
    tasks = requests.start(b"peer", 5)
    await settle()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert requests.running == []
    assert requests.limiter._own == {}
    again = requests.start(b"peer", 5)
    await settle()
    assert len(requests.running) == 3
    requests.end.set()
    assert await asyncio.gather(*again) == ["done"] * 5


@pytest.mark.parametrize("peer", ["", b"peer"])
def test_requests_that_wait_for_other_nodes_leave_places_to_the_others(
    peer: bytes | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four places, in all and of a peer, three are for them, however many come first: one that waits for nobody runs
    at once, and all run in the end."""
    monkeypatch.setattr(concurrency, "MAX_CONCURRENT_HANDLERS", 4)
    monkeypatch.setattr(concurrency, "MAX_HANDLERS_PER_PEER", 4)

    async def main() -> None:
        limiter, running, answered = HandlerLimiter(), 0, asyncio.Event()

        async def push() -> None:
            nonlocal running
            async with limiter.handler(peer, waits=True):
                running += 1
                await answered.wait()

        async def forward() -> None:
            async with limiter.handler(peer):
                answered.set()

        pushes = [asyncio.ensure_future(push()) for _ in range(10)]
        await settle()
        assert running == 3
        async with asyncio.timeout(60):
            await forward()
            await asyncio.gather(*pushes)

    asyncio.run(main())


def test_half_of_the_descriptors_that_are_not_reserved_are_for_accepted_connections() -> None:
    """256 descriptors leave 96 places, and the fewest leave some."""
    assert places_of(256) == 96
    assert places_of(1024) == 480
    assert places_of(20) == MIN_PLACES


def test_nothing_is_closed_while_there_are_places() -> None:
    """Connections up to the limit are kept, and a place that became free is used again."""
    places: ConnectionPlaces[int] = ConnectionPlaces(3)
    assert [places.enter(key, "h") for key in range(3)] == [None] * 3
    places.leave(1)
    assert places.enter(3, "h") is None
    assert len(places) == 3


def test_the_oldest_silent_connection_of_the_busiest_host_makes_room() -> None:
    """One host with many silent connections loses its oldest, and another host's only one stays."""
    places: ConnectionPlaces[str] = ConnectionPlaces(4)
    for key, host in (("m", "member"), ("a", "flood"), ("b", "flood"), ("c", "flood")):
        assert places.enter(key, host) is None
    assert places.enter("d", "flood") == "a"


def test_a_connection_that_brought_a_request_outlasts_silent_ones() -> None:
    """While silent ones are there, one that waits for its next request is not closed, however old."""
    places: ConnectionPlaces[str] = ConnectionPlaces(3)
    places.enter("member", "h")
    places.begin("member")
    places.end("member")
    assert places.enter("a", "h") is None
    assert places.enter("b", "h") is None
    for old, new in (("a", "c"), ("b", "d"), ("c", "e")):
        assert places.enter(new, "h") == old


def test_a_request_that_is_being_served_is_never_closed() -> None:
    """If all are being served the new one is closed; when one has ended, that one makes room."""
    places: ConnectionPlaces[int] = ConnectionPlaces(2)
    for key in (1, 2):
        places.enter(key, "h")
        places.begin(key)
    assert places.enter(3, "h") == 3
    places.end(2)
    assert places.enter(4, "h") == 2


def test_of_many_that_come_at_once_each_closes_another() -> None:
    """A hundred are accepted before any is closed: each takes the place of a different one, and none beyond the limit
    is left."""
    places: ConnectionPlaces[int] = ConnectionPlaces(10)
    closed = [places.enter(key, "h") for key in range(100)]
    assert closed == [None] * 10 + list(range(90))
    assert len(places) == 10
