"""Which accepted connections are kept while there are too few places."""

from __future__ import annotations

from p2pnode.overlay.sockets.concurrency import MIN_PLACES, ConnectionPlaces, places_of


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
