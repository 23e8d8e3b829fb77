"""New files appear whole or not at all; appending keeps what is there."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pnode.training.dispatch.recordio import (
    Compressor,
    RecordFile,
    create_records,
    files,
)
from tests.harness.builders.recordio import encode

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
    """When the disk is full, nothing of a new file is left; short writes are continued."""
    whole = files._Whole
    monkeypatch.setattr(files, "_Whole", lambda file: whole(_Limited(file, room)))
    path = tmp_path / "new"
    full = pytest.raises(OSError, match="No space left") if room < 100 else contextlib.nullcontext()
    with full, create_records(path, compressor=Compressor.NONE, records_per_chunk=1) as writer:
        writer.write_all([b"first record", b"second record"])

    assert names(tmp_path) == ([] if room < 100 else ["new"])
    assert room < 100 or read(path) == [b"first record", b"second record"]
