"""The ring of events: numbering, loss that is counted, waiting, and fields that are plain."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.status.events import EventLog, EventRing, plain


def filled(count: int, capacity: int = 10) -> EventRing:
    ring = EventRing(capacity)
    for index in range(count):
        ring.add("info", f"event{index + 1}", {}, wall=float(index))
    return ring


class FixedClock:
    def monotonic(self) -> float:
        return 0.0

    def wall(self) -> float:
        return 1.5


class ListWriter:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    def debug(self, event: str, **fields: Any) -> None:
        self.lines.append(("debug", event, fields))

    def info(self, event: str, **fields: Any) -> None:
        self.lines.append(("info", event, fields))

    def warning(self, event: str, **fields: Any) -> None:
        self.lines.append(("warning", event, fields))

    def error(self, event: str, **fields: Any) -> None:
        self.lines.append(("error", event, fields))


@pytest.mark.parametrize(
    ("since", "limit", "ids", "dropped"),
    [
        (0, 100, list(range(6, 16)), 5),
        (4, 100, list(range(6, 16)), 1),
        (5, 100, list(range(6, 16)), 0),
        (12, 100, [13, 14, 15], 0),
        (15, 100, [], 0),
        (12, 2, [13, 14], 0),
        (0, 2, [6, 7], 5),
        (99, 100, list(range(6, 16)), 5),
    ],
)
def test_a_reader_gets_what_is_newer_and_learns_what_it_missed(
    since: int, limit: int, ids: list[int], dropped: int
) -> None:
    """Of fifteen events in a ring of ten, a reader gets the newer ones in order and the number of those lost."""
    page = filled(15).since(since, limit)

    assert ([event.id for event in page.events], page.dropped, page.last) == (ids, dropped, 15)


def test_an_empty_ring_answers() -> None:
    """Before the first event there is nothing, and nothing was lost."""
    assert EventRing().since(0) == ([], 0, 0)


def test_reading_page_by_page_misses_nothing() -> None:
    """Asking again with the last number seen yields every event once."""
    ring, seen, since = filled(9), list[int](), 0
    while page := ring.since(since, 2).events:
        seen += [event.id for event in page]
        since = page[-1].id

    assert seen == list(range(1, 10))


def test_fields_become_plain_json() -> None:
    """Ids are hexadecimal, addresses are as people write them, and long texts are cut."""
    fields = {
        "id": b"\x01\xff",
        "address": Address("::1", 80),
        "list": [Address("1.2.3.4", 5), None],
        "table": {1: {2}},
        "long": "x" * 5000,
        "error": ValueError("why"),
    }

    result = plain(fields)

    assert result["id"] == "01ff"
    assert result["address"] == "[::1]:80"
    assert result["list"] == ["1.2.3.4:5", None]
    assert result["table"] == {"1": "{2}"}
    assert len(result["long"]) == 2001
    assert result["error"] == "why"
    assert msgspec.json.decode(msgspec.json.encode(result)) == result


def test_the_log_writes_everything_and_keeps_what_matters() -> None:
    """Debug goes to the writer only; the rest also to the ring, with wall time and the same fields."""
    ring, writer = EventRing(), ListWriter()
    log = EventLog(ring, writer, FixedClock())

    log.debug("detail")
    log.info("joined", peer=b"\x01")
    log.warning("odd")
    log.error("bad")

    assert [line[:2] for line in writer.lines] == [
        ("debug", "detail"),
        ("info", "joined"),
        ("warning", "odd"),
        ("error", "bad"),
    ]
    events = ring.since(0).events
    assert [(event.level, event.event, event.time) for event in events] == [
        ("info", "joined", 1.5),
        ("warning", "odd", 1.5),
        ("error", "bad", 1.5),
    ]
    assert events[0].fields == {"peer": "01"} == writer.lines[1][2]


def test_evaluations_in_quick_succession_are_thinned_in_the_log_and_not_in_the_ring() -> None:
    """Of evaluations within five seconds the log gets one as info; other events are never held back."""
    ring, writer, clock = EventRing(), ListWriter(), FixedClock()
    now = 0.0
    clock.monotonic = lambda: now  # type: ignore[method-assign]
    log = EventLog(ring, writer, clock)
    for now in (0.0, 1.0, 4.9, 5.0, 6.0):
        log.info("evaluated", accuracy=now)
        log.info("peer_left")

    levels = [(level, fields["accuracy"]) for level, event, fields in writer.lines if event == "evaluated"]
    assert levels == [("info", 0.0), ("debug", 1.0), ("debug", 4.9), ("info", 5.0), ("debug", 6.0)]
    assert [level for level, event, _ in writer.lines if event == "peer_left"] == ["info"] * 5
    assert sum(event.event == "evaluated" for event in ring.since(0).events) == 5
