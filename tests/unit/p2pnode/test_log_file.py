"""The log file is bounded, its readers follow it through a change, and its lines are entries."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pnode.log_file import (
    FORMER_FILE,
    LOG_FILE,
    Entry,
    EntryFilter,
    Follower,
    bounded,
    event_entry,
    former_lines,
    is_log_of,
    last,
    line_entry,
    open_log,
)


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    opened = open_log(tmp_path)
    yield opened
    os.close(opened)


def test_a_full_file_becomes_the_former_one(tmp_path: Path, descriptor: int) -> None:
    """Two files of at most that size and one line remain, with the newest lines; no other user reads them."""
    write = bounded(tmp_path, lambda data: os.write(descriptor, data), (descriptor,), max_bytes=100)
    for number in range(50):
        write(b"%9d\n" % number)

    sizes = [(tmp_path / name).stat().st_size for name in (LOG_FILE, FORMER_FILE)]
    assert all(0 < size <= 110 for size in sizes)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOG_FILE, FORMER_FILE]
    with Follower(tmp_path / LOG_FILE) as follower:
        kept = [int(line) for line in [*former_lines(tmp_path / LOG_FILE), *follower.read()]]
    assert kept == list(range(kept[0], 50))
    assert is_log_of(tmp_path, descriptor)
    assert (tmp_path / LOG_FILE).stat().st_mode & 0o077 == 0


def test_one_that_another_process_changed_is_not_moved_again(tmp_path: Path, descriptor: int) -> None:
    """Local nodes that were started twice share a log: the second one to notice goes over to the new file."""
    write = bounded(tmp_path, lambda data: os.write(descriptor, data), (descriptor,), max_bytes=6)
    write(b"first\n")
    (tmp_path / LOG_FILE).replace(tmp_path / FORMER_FILE)
    (tmp_path / LOG_FILE).write_bytes(b"other\n")
    write(b"second\n")

    assert (tmp_path / LOG_FILE).read_bytes() == b"other\nsecond\n"
    assert (tmp_path / FORMER_FILE).read_bytes() == b"first\n"


def test_only_the_log_of_the_directory_is_one(tmp_path: Path, descriptor: int) -> None:
    """A redirection to another file is bounded by who made it."""
    other = os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        assert is_log_of(tmp_path, descriptor)
        assert not is_log_of(tmp_path, other)
        assert not is_log_of(tmp_path / "missing", other)
        assert bounded(tmp_path, print, (other,)) is print
    finally:
        os.close(other)


def test_a_follower_gives_whole_lines_and_goes_over_to_the_next_file(tmp_path: Path, descriptor: int) -> None:
    """A line appears when it is complete; what was written before the change is not lost."""
    with Follower(tmp_path / LOG_FILE) as follower:
        os.write(descriptor, b"one\ntw")
        assert follower.read() == ["one"]
        os.write(descriptor, b"o\nthree\n")
        (tmp_path / LOG_FILE).replace(tmp_path / FORMER_FILE)
        (tmp_path / LOG_FILE).write_bytes(b"four\n\xff\n")
        assert follower.read() == ["two", "three", "four", "\ufffd"]
        assert follower.read() == []


def test_a_line_that_goes_on_in_the_next_file_stays_whole(tmp_path: Path, descriptor: int) -> None:
    """What a script prints in two pieces may be divided by the begin of a new file."""
    write = bounded(tmp_path, lambda data: os.write(descriptor, data), (descriptor,), max_bytes=6)
    with Follower(tmp_path / LOG_FILE) as follower:
        write(b"one\ntw")
        write(b"o\n")

        assert (tmp_path / LOG_FILE).read_bytes() == b"o\n"
        assert follower.read() == ["one", "two"]


LINE = '{"peer": "ab", "event": "peer_dead", "level": "warning", "timestamp": "1970-01-01T00:01:00Z"}'


def test_a_line_of_json_is_an_event_with_its_time() -> None:
    """Level, event and timestamp leave the fields; a number in front is that of a local node."""
    assert line_entry(LINE) == Entry(60.0, "warning", "peer_dead", {"peer": "ab"})
    assert line_entry(f"[3] {LINE}") == Entry(60.0, "warning", "peer_dead", {"node": 3, "peer": "ab"})
    assert event_entry({"id": 1, "time": 60, "level": "warning", "event": "peer_dead", "fields": {"peer": "ab"}}) == (
        Entry(60.0, "warning", "peer_dead", {"peer": "ab"})
    )


@pytest.mark.parametrize(
    "line", ["error: no way", "[2] error: no way", "Traceback", "{", "[1]", '{"event": 3}', "[" * 9999]
)
def test_any_other_line_keeps_its_text(line: str) -> None:
    """It has no event; what begins with "error:" is one."""
    entry = line_entry(line)
    assert (entry.event, entry.fields) == ("", {"text": line})
    assert entry.level == ("error" if "error:" in line else "")


def test_a_level_takes_what_is_worse_and_lines_without_one() -> None:
    """A message of the interpreter is never hidden by a level, but by a name."""
    entries = [Entry(0, level, f"peer_{level}", {}) for level in ("debug", "info", "warning", "error")]
    entries.append(line_entry("Traceback"))

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
