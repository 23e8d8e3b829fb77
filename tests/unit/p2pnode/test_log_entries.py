"""Lines of a log as entries, and which of them are wanted."""

from __future__ import annotations

import pytest

from p2pnode.log_file import Entry, EntryFilter, last, of_event, of_line

LINE = '{"peer": "ab", "event": "peer_dead", "level": "warning", "timestamp": "1970-01-01T00:01:00Z"}'


def test_a_line_of_json_is_an_event_with_its_time() -> None:
    """Level, event and timestamp leave the fields; a number in front is that of a local node."""
    assert of_line(LINE) == Entry(60.0, "warning", "peer_dead", {"peer": "ab"})
    assert of_line(f"[3] {LINE}") == Entry(60.0, "warning", "peer_dead", {"node": 3, "peer": "ab"})
    assert of_event({"id": 1, "time": 60, "level": "warning", "event": "peer_dead", "fields": {"peer": "ab"}}) == (
        Entry(60.0, "warning", "peer_dead", {"peer": "ab"})
    )


@pytest.mark.parametrize(
    "line", ["error: no way", "[2] error: no way", "Traceback", "{", "[1]", '{"event": 3}', "[" * 9999]
)
def test_any_other_line_keeps_its_text(line: str) -> None:
    """It has no event; what begins with "error:" is one."""
    entry = of_line(line)
    assert (entry.event, entry.fields) == ("", {"text": line})
    assert entry.level == ("error" if "error:" in line else "")


def test_a_level_takes_what_is_worse_and_lines_without_one() -> None:
    """A message of the interpreter is never hidden by a level, but by a name."""
    entries = [Entry(0, level, f"peer_{level}", {}) for level in ("debug", "info", "warning", "error")]
    entries.append(of_line("Traceback"))

    def names(wanted: EntryFilter) -> list[str]:
        return [entry.event for entry in entries if wanted.takes(entry)]

    assert names(EntryFilter()) == ["peer_info", "peer_warning", "peer_error", ""]
    assert names(EntryFilter("error")) == ["peer_error", ""]
    assert names(EntryFilter("debug", ["peer_w*", "peer_debug"])) == ["peer_debug", "peer_warning"]
    assert names(EntryFilter("debug", ["peer"])) == []


def test_the_last_ones_are_counted_after_the_filter() -> None:
    """Two of the wanted ones, and none where none are asked for."""
    entries = [Entry(0, "warning" if at < 3 else "info", f"event_{at}", {}) for at in range(9)]
    assert [entry.event for entry in last(entries, EntryFilter("warning"), 2)] == ["event_1", "event_2"]
    assert last(entries, EntryFilter(), 0) == []
