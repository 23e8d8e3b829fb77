"""Where chunks are cut, which limits can be, and new files that appear whole or not at all."""

from __future__ import annotations

import io
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pnode.training.dispatch.recordio import Compressor, RecordFile, RecordWriter, create_records, read_index
from p2pnode.training.dispatch.recordio.reader import walk
from tests.harness.builders.recordio import encode

OLD = encode([b"old", b""], Compressor.NONE)


def cut(records: list[bytes], **limits: int) -> list[int]:
    """How many records each chunk has."""
    sink = io.BytesIO()
    writer = RecordWriter(sink, compressor=Compressor.NONE, **limits)
    writer.write_all(records)
    writer.flush()
    writer.flush()
    counts = [place.records for place in walk(sink, "memory", len(sink.getvalue()))]
    assert (writer.records, writer.chunks, writer.written_bytes) == (len(records), len(counts), len(sink.getvalue()))
    return counts


@pytest.mark.parametrize(
    ("sizes", "counts"),
    [
        ([5, 5, 5], [2, 1]),
        ([5, 6, 4], [1, 2]),
        ([11, 1], [1, 1]),
        ([1, 30, 1], [1, 1, 1]),
        ([10, 0, 0, 1], [3, 1]),
        ([], []),
        ([0], [1]),
    ],
)
def test_a_chunk_is_cut_before_the_record_that_is_too_much(sizes: list[int], counts: list[int]) -> None:
    """The bytes of the records count and their lengths do not, as in the Go implementation; no chunk is empty."""
    assert cut([b"x" * size for size in sizes], chunk_bytes=10) == counts


def test_a_chunk_has_at_most_so_many_records() -> None:
    """With records_per_chunk a chunk ends after that number as well."""
    assert cut([b"x"] * 7, records_per_chunk=3) == [3, 3, 1]
    assert cut([b"xxxx"] * 5, records_per_chunk=3, chunk_bytes=8) == [2, 2, 1]


def test_empty_records_do_not_make_an_endless_chunk() -> None:
    """Records without bytes fill a chunk by their lengths, at eight times its size."""
    assert cut([b""] * 45, chunk_bytes=10) == [20, 20, 5]


@pytest.mark.parametrize("limits", [{"chunk_bytes": 0}, {"chunk_bytes": 2**27 + 1}, {"records_per_chunk": 0}])
def test_limits_that_cannot_be_are_refused(limits: dict[str, int]) -> None:
    """A limit out of its range is an error that names it and the range."""
    with pytest.raises(ValueError, match=f"{next(iter(limits))} is .* must be"):
        RecordWriter(io.BytesIO(), **limits)


def test_the_default_is_that_of_the_reference(tmp_path: Path) -> None:
    """Without settings a chunk has 32 MiB of records, compressed with snappy."""
    path = tmp_path / "file"
    with path.open("wb") as file:
        writer = RecordWriter(file)
        writer.write_all([bytes(2**20)] * 33)
        writer.flush()
    chunks = read_index(path).chunks

    assert [chunk.records for chunk in chunks] == [32, 1]
    assert {chunk.header.compressor for chunk in chunks} == {Compressor.SNAPPY}


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


@pytest.mark.parametrize("room", [10, 60])
def test_a_full_disk_leaves_no_half_file(room: int, tmp_path: Path) -> None:
    """Where the system takes no more bytes, in the first chunk or in the second, nothing of a new file is left."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with (
            pytest.raises(OSError, match="File too large"),
            create_records(tmp_path / "new", compressor=Compressor.NONE, records_per_chunk=1) as writer,
        ):
            writer.write_all([b"first record", b"second record"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert names(tmp_path) == []
