"""The index of a record file: places of chunks by their headers, torn ends, and damaged sizes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from p2pnode.training.dispatch.recordio.index import place_at, read_exactly, read_index, walk
from p2pnode.training.dispatch.recordio.layout import HEADER_BYTES, MAGIC_BYTES, Compressor, CorruptChunk, TornChunk
from tests.harness.builders.recordio import encode

FIRST = [b"Hello", b"", b"World,"]
SECOND = [b"RecordIO!", b"the second chunk"]


def written(folder: Path, data: bytes) -> Path:
    path = folder / "file"
    path.write_bytes(data)
    return path


def test_an_index_reads_no_payload(tmp_path: Path) -> None:
    """The index of a file with damaged payloads is whole: only headers are read."""
    data = bytearray(encode(FIRST, Compressor.NONE) + encode(SECOND, Compressor.GZIP))
    data[25] ^= 0xFF
    index = read_index(written(tmp_path, bytes(data)))

    assert [(chunk.number, chunk.offset, chunk.records) for chunk in index.chunks] == [(0, 0, 3), (1, 43, 2)]
    assert (index.records, index.file_bytes, index.whole_bytes, index.torn) == (5, len(data), len(data), None)


def test_an_empty_file_has_no_chunk_and_no_bytes(tmp_path: Path) -> None:
    """A file of one chunk ends where that ends; a missing file is the system's error."""
    empty = read_index(written(tmp_path, b""))
    assert (empty.chunks, empty.records, empty.file_bytes, empty.whole_bytes) == ((), 0, 0, 0)

    data = encode(FIRST, Compressor.NONE)
    (place,) = read_index(written(tmp_path, data)).chunks
    assert (place.number, place.offset, place.end, place.records) == (0, 0, len(data), 3)
    with pytest.raises(FileNotFoundError):
        read_index(tmp_path / "missing")


def test_a_file_cut_anywhere_in_its_last_chunk_is_torn(tmp_path: Path) -> None:
    """In the header or in the payload: refused with its place, or left out and reported."""
    first, second = encode(FIRST, Compressor.NONE), encode(SECOND, Compressor.NONE)
    for cut in (1, HEADER_BYTES - 1, HEADER_BYTES, len(second) - 1):
        path = written(tmp_path, first + second[:cut])
        with pytest.raises(TornChunk, match="whoever wrote it was interrupted") as torn:
            read_index(path)
        assert (torn.value.chunk, torn.value.offset) == (1, len(first))

        index = read_index(path, torn="skip")
        assert (len(index.chunks), index.whole_bytes, index.file_bytes) == (1, len(first), len(first) + cut)
        assert index.torn is not None
        assert index.torn.offset == len(first)


def test_an_end_that_is_not_the_begin_of_a_chunk_is_corrupt(tmp_path: Path) -> None:
    """Fewer bytes than a header, and others than its first: no writer was interrupted there."""
    first = encode(FIRST, Compressor.NONE)
    with pytest.raises(CorruptChunk, match="the last 3 bytes are not a chunk"):
        read_index(written(tmp_path, first + b"\x04\x03\x03"), torn="skip")
    with pytest.raises(CorruptChunk, match="the size of the chunk before is damaged"):
        read_index(written(tmp_path, first + bytes(40)), torn="skip")
    with pytest.raises(CorruptChunk, match="no chunk begins here") as corrupt:
        read_index(written(tmp_path, bytes(40)))
    assert "before" not in str(corrupt.value)


def test_a_damaged_size_is_not_a_torn_chunk(tmp_path: Path) -> None:
    """A size that points behind the file is a damaged size when whole chunks follow, not a torn last chunk."""
    first, rest = encode(FIRST, Compressor.NONE), encode(SECOND, Compressor.NONE)
    damaged = bytearray(first + rest * 3)
    damaged[14] ^= 1
    path = written(tmp_path, bytes(damaged))

    with pytest.raises(CorruptChunk, match="the size is damaged"):
        read_index(path, torn="skip")


def test_a_damaged_size_of_the_last_chunk_is_told_by_its_checksum(tmp_path: Path) -> None:
    """The whole payload is there though the header says more, also where it has bytes like the begin of a chunk."""
    for records in (SECOND, [MAGIC_BYTES, b"x" + MAGIC_BYTES * 3, MAGIC_BYTES[:2]]):
        damaged = bytearray(encode(records, Compressor.NONE))
        damaged[14] ^= 1
        with pytest.raises(CorruptChunk, match="the size is damaged"):
            read_index(written(tmp_path, bytes(damaged)), torn="skip")


def test_a_walk_may_begin_anywhere_and_the_file_may_be_moved_meanwhile() -> None:
    """Each header is looked up at its own offset."""
    first, second = encode(FIRST, Compressor.NONE), encode(SECOND, Compressor.SNAPPY)
    data = first + second + first
    file = io.BytesIO(data)
    ends = []
    for place in walk(file, "file", len(data)):
        ends.append(place.end)
        file.seek(0)

    assert ends == [len(first), len(first + second), len(data)]
    place = place_at(file, "file", len(data), len(first), None)
    assert (place.number, place.offset, place.header.compressor) == (-1, len(first), Compressor.SNAPPY)


def test_a_file_that_gives_a_byte_at_a_time_is_read_to_its_end() -> None:
    """An unbuffered file may return less than it has."""

    class Slow(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(min(1, size or 0))

    assert read_exactly(Slow(b"abcdef"), 4) == b"abcd"
    assert read_exactly(Slow(b"ab"), 4) == b"ab"
    assert read_exactly(Slow(b"ab"), 0) == b""
