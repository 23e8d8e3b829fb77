"""Where chunks are cut, and which limits can be."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from p2pnode.training.dispatch.recordio import Compressor, RecordWriter, read_index
from p2pnode.training.dispatch.recordio.index import walk


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
