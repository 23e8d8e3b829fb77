"""New files appear whole or not at all; appending keeps what is there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.builders.recordio import encode
from training.dispatch.recordio import (
    Compressor,
    CorruptChunk,
    RecordFile,
    RecordFileError,
    TornChunk,
    append_records,
    create_records,
    create_series,
    files,
)

OLD = encode([b"old", b""], Compressor.NONE)


def read(path: Path) -> list[bytes]:
    """All records of a whole file."""
    with RecordFile(path) as file:
        return list(file)


def broken(*records: bytes) -> Iterator[bytes]:
    """These records, and then an error."""
    yield from records
    raise RuntimeError("broken")


def names(folder: Path) -> list[str]:
    """Everything in a folder, hidden files too."""
    return sorted(entry.name for entry in folder.iterdir())


def test_a_new_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    """Until the block ends there is no file of that name, and then it has every record."""
    path = tmp_path / "a.recordio"
    with create_records(path, records_per_chunk=1) as writer:
        writer.write_all([b"one", b"", b"two"])
        assert not path.exists()

    assert read(path) == [b"one", b"", b"two"]
    assert names(tmp_path) == ["a.recordio"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    """A block that raises leaves neither a file nor a draft, and a file that was there as it was."""
    path = tmp_path / "a.recordio"
    for old in (None, OLD):
        if old is not None:
            path.write_bytes(old)
        with (
            pytest.raises(RuntimeError, match="broken"),
            create_records(path, overwrite=True, records_per_chunk=1) as writer,
        ):
            writer.write_all(broken(b"one", b"two"))
        assert names(tmp_path) == ([] if old is None else ["a.recordio"])
    assert path.read_bytes() == OLD


def test_a_file_is_replaced_only_when_asked(tmp_path: Path) -> None:
    """A file that exists is an error, unless overwrite is true."""
    path = tmp_path / "a.recordio"
    path.write_bytes(OLD)

    with pytest.raises(FileExistsError, match=r"a\.recordio exists already"), create_records(path):
        pass
    assert path.read_bytes() == OLD
    with create_records(path, overwrite=True) as writer:
        writer.write(b"new")
    assert read(path) == [b"new"]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"records_per_file": 2}, [[b"0", b"1"], [b"2", b"3"], [b"4"]]),
        # A chunk of one record of a byte without compression has 25 bytes.
        ({"file_bytes": 26}, [[b"0", b"1"], [b"2", b"3"], [b"4"]]),
        ({"file_bytes": 25}, [[b"0"], [b"1"], [b"2"], [b"3"], [b"4"]]),
        ({"records_per_file": 9}, [[b"0", b"1", b"2", b"3", b"4"]]),
    ],
)
def test_a_series_is_cut_into_numbered_files(
    limits: dict[str, int], expected: list[list[bytes]], tmp_path: Path
) -> None:
    """A file ends after so many records, or with the chunk that brings it to so many bytes; all get their names at
    the end."""
    path = tmp_path / "t.recordio"
    with create_series(path, compressor=Compressor.NONE, records_per_chunk=1, **limits) as series:
        for number in range(5):
            series.write(str(number).encode())
        assert not list(tmp_path.glob("t-*"))

    assert names(tmp_path) == [f"t-{number:05d}.recordio" for number in range(len(expected))]
    assert [read(file) for file in series.paths] == expected
    assert (series.records, series.chunks, series.written_bytes) == (5, 5, 125)


def test_a_shorter_series_leaves_nothing_of_a_longer_one(tmp_path: Path) -> None:
    """Numbered files that exist are refused; with overwrite those that the new series lacks are removed at its end."""
    path = tmp_path / "t[1].recordio"
    other = tmp_path / "t1-00000.recordio"
    other.write_bytes(OLD)
    with create_series(path, records_per_file=1) as series:
        for record in (b"a", b"b", b"c"):
            series.write(record)
    with pytest.raises(FileExistsError, match=r"t\[1\]-00000"), create_series(path, records_per_file=9):
        pass
    with pytest.raises(RuntimeError), create_series(path, records_per_file=9, overwrite=True):
        raise RuntimeError
    assert len(names(tmp_path)) == 4
    with create_series(path, records_per_file=9, overwrite=True) as series:
        series.write(b"d")

    assert names(tmp_path) == ["t1-00000.recordio", "t[1]-00000.recordio"]
    assert read(series.paths[0]) == [b"d"]


def test_appending_keeps_what_is_there(tmp_path: Path) -> None:
    """Chunks are added behind the old ones, with another compressor if asked; a missing file is made."""
    path = tmp_path / "a.recordio"
    for number, compressor in enumerate(Compressor):
        with append_records(path, compressor=compressor) as writer:
            writer.write(b"%d" % number)

    assert read(path) == [b"0", b"1", b"2"]


def test_an_append_that_fails_changes_nothing(tmp_path: Path) -> None:
    """A block that raises cuts the file back to its former length, and removes a file that it made."""
    path = tmp_path / "a.recordio"
    for old, left in ((None, []), (OLD, ["a.recordio"])):
        if old is not None:
            path.write_bytes(old)
        with pytest.raises(RuntimeError, match="broken"), append_records(path, records_per_chunk=1) as writer:
            writer.write_all(broken(b"x", b"y"))
        assert (writer.chunks, writer.records) == (2, 2), "both chunks must have been in the file"
        assert names(tmp_path) == left
    assert path.read_bytes() == OLD


def test_nothing_is_appended_to_a_torn_chunk_unless_it_is_cut_off(tmp_path: Path) -> None:
    """A torn last chunk is refused with what to do, and cut off when asked; the file is unchanged until then."""
    path = tmp_path / "a.recordio"
    torn = OLD + OLD[:-1]
    path.write_bytes(torn)

    with pytest.raises(TornChunk, match=r"cut this chunk off \(torn=\"truncate\"\)"), append_records(path):
        pass
    assert path.read_bytes() == torn
    with append_records(path, torn="truncate") as writer:
        writer.write(b"new")
    assert read(path) == [b"old", b"", b"new"]


def test_nothing_is_appended_to_another_file(tmp_path: Path) -> None:
    """A file that is no RecordIO file is refused and stays as it is, also with torn="truncate"."""
    path = tmp_path / "notes.txt"
    path.write_bytes(b"my notes, no records")

    with pytest.raises(CorruptChunk, match="no chunk begins here"), append_records(path, torn="truncate"):
        pass
    assert path.read_bytes() == b"my notes, no records"


def test_one_process_appends_at_a_time(tmp_path: Path) -> None:
    """A file that another process is writing is refused."""
    path = tmp_path / "a.recordio"
    path.write_bytes(OLD)
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(RecordFileError, match="another process is writing"), append_records(path):
            pass
    assert path.read_bytes() == OLD


class _Limited:
    """A file that writes at most three bytes a call, and fails when it has `room` bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self._room = file, room

    def write(self, data: memoryview) -> int:
        if self._room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = data[: min(3, self._room)]
        self._room -= len(part)
        return int(self._file.write(part))


@pytest.mark.parametrize("room", [0, 10, 60, 10_000])
def test_a_full_disk_leaves_no_half_file(room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk is full, neither a new file nor a part of an appended one is left; short writes are continued."""
    whole = files._Whole
    monkeypatch.setattr(files, "_Whole", lambda file: whole(_Limited(file, room)))
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(OLD)
    records = [b"first record", b"second record"]
    for path, open_ in ((new, create_records), (old, append_records)):
        full = pytest.raises(OSError, match="No space left") if room < 100 else contextlib.nullcontext()
        with full, open_(path, compressor=Compressor.NONE, records_per_chunk=1) as writer:
            writer.write_all(records)

    assert names(tmp_path) == (["old"] if room < 100 else ["new", "old"])
    assert read(old) == [b"old", b""] + (records if room > 100 else [])
