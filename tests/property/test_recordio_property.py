"""RecordIO files give back what was written: whatever the records, the chunks, the joins and the cut."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pnode.training.dispatch.recordio import Compressor, RecordFile, RecordWriter, TornChunk, read_chunk, read_index
from p2pnode.training.dispatch.recordio import chunk as chunks
from tests.harness.builders.recordio import encode

FIXED = settings(derandomize=True, database=None, deadline=None, max_examples=60)
#: Equal lengths are a case of their own in the reader: two strategies.
RECORDS = st.one_of(
    st.lists(st.binary(max_size=40), max_size=30),
    st.integers(0, 9).flatmap(lambda size: st.lists(st.binary(min_size=size, max_size=size), max_size=30)),
)
COMPRESSORS = st.sampled_from(list(Compressor))


def written(records: list[bytes], compressor: Compressor, chunk_bytes: int) -> bytes:
    """A file of these records."""
    sink = io.BytesIO()
    writer = RecordWriter(sink, compressor=compressor, chunk_bytes=chunk_bytes)
    writer.write_all(records)
    writer.flush()
    return sink.getvalue()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records") / "file"


@FIXED
@given(st.lists(st.tuples(RECORDS, COMPRESSORS, st.integers(1, 100)), max_size=3))
def test_files_one_after_the_other_give_all_records(
    path: Path, files: list[tuple[list[bytes], Compressor, int]]
) -> None:
    """Files of any compressors and sizes, concatenated, are read whole: in order, by chunk, and by offset."""
    path.write_bytes(b"".join(written(*file) for file in files))
    expected = list(itertools.chain.from_iterable(records for records, _, _ in files))
    index = read_index(path)

    with RecordFile(path) as file:
        assert list(file) == expected
        assert [record for number in range(len(index.chunks)) for record in file.chunk(number)] == expected
    found = [read_chunk(path, place.offset, place.number, records=place.records) for place in index.chunks]
    assert [record for chunk in found for record in chunk.records()] == expected
    assert index.records == len(expected)


@FIXED
@given(RECORDS.filter(bool), COMPRESSORS, st.integers(1, 100), st.integers(1, 10_000))
def test_a_file_cut_anywhere_gives_its_whole_chunks(
    path: Path, records: list[bytes], compressor: Compressor, chunk_bytes: int, cut: int
) -> None:
    """Of a file that is cut at any byte, the records of its whole chunks are read, and the rest is reported."""
    data = written(records, compressor, chunk_bytes)
    path.write_bytes(data)
    places = read_index(path).chunks
    size = cut % len(data)
    path.write_bytes(data[:size])
    whole = [place for place in places if place.end <= size]

    with RecordFile(path, torn="skip") as file:
        assert list(file) == records[: sum(place.records for place in whole)]
        assert (file.torn_chunk is None) == (size in (0, *(place.end for place in whole)))
        assert file.torn_chunk is None or type(file.torn_chunk) is TornChunk
    assert list(read_index(path, torn="skip").chunks) == whole


@FIXED
@given(RECORDS.filter(bool), st.slices(30), st.integers(1, 7))
def test_a_chunk_is_a_sequence(records: list[bytes], part: slice, block: int) -> None:
    """Items, slices and iteration in blocks of a chunk are those of the list of its records."""
    data = encode(records, Compressor.NONE)
    chunk = chunks.Chunk(data[20:], chunks.record_ends(data[20:], len(records)))
    before = chunks._BLOCK_RECORDS
    chunks._BLOCK_RECORDS = block
    try:
        assert list(chunk) == records
    finally:
        chunks._BLOCK_RECORDS = before
    assert chunk.records() == records
    assert chunk[part] == records[part]
    assert [chunk[number] for number in range(-len(records), len(records))] == records * 2
    with pytest.raises(IndexError):
        chunk[len(records)]
