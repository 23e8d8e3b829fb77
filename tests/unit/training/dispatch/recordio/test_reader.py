"""Reading RecordIO files: index, random access, torn tails, and every bit flipped in turn."""

from __future__ import annotations

import pickle
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from p2pnode.training.dispatch.recordio import (
    Chunk,
    ChunkTooLarge,
    Compressor,
    CorruptChunk,
    RecordFile,
    TornChunk,
    create_records,
    read_chunk,
    read_index,
)
from p2pnode.training.dispatch.recordio.chunk import MAGIC_BYTES
from tests.harness.builders.recordio import encode

FIRST = [b"Hello", b"", b"World,"]
SECOND = [b"RecordIO!", b"the second chunk"]


@pytest.fixture(params=list(Compressor), ids=lambda each: each.name.lower())
def data(request: pytest.FixtureRequest) -> bytes:
    """A small file of two chunks."""
    return encode(FIRST, request.param) + encode(SECOND, request.param)


def read(path: Path, torn: str = "refuse") -> tuple[list[bytes], TornChunk | None]:
    """All records, and the torn chunk that was skipped."""
    with RecordFile(path, torn=torn) as file:  # type: ignore[arg-type]
        return list(file), file.torn_chunk


def test_no_flipped_bit_yields_a_wrong_record(data: bytes, tmp_path: Path) -> None:
    """Each bit of a file flipped in turn is an error with its place, also where torn chunks are skipped."""
    path = tmp_path / "flipped"
    silent: list[tuple[int, object]] = []
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            silent.append((bit, read(path, "skip")))
        except CorruptChunk as error:
            if error.offset is None or error.path != str(path):
                silent.append((bit, error))

    assert silent == [], "neither a wrong record nor a whole one that is left out: a damaged size is no torn chunk"


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_any_chunk_is_read_by_itself(data: bytes, tmp_path: Path) -> None:
    """A chunk is read by its number or its offset, and nothing else of the file is looked at."""
    path = _write(tmp_path / "file", data)
    place = read_index(path).chunks[1]
    with RecordFile(path) as file:
        assert file.chunk(1).records() == SECOND
        assert file.chunk(0).records() == FIRST
        assert len(file) == 5
        with pytest.raises(IndexError, match="there is no chunk 2"):
            file.chunk(2)
    path.write_bytes(b"\xff" * place.offset + data[place.offset :])
    assert read_chunk(path, place.offset, 1, records=2).records() == SECOND


def test_an_index_reads_no_payload(tmp_path: Path) -> None:
    """The index of a file with damaged payloads is whole: only headers are read."""
    data = bytearray(encode(FIRST, Compressor.NONE) + encode(SECOND, Compressor.GZIP))
    data[25] ^= 0xFF
    index = read_index(_write(tmp_path / "file", bytes(data)))

    assert [(chunk.number, chunk.offset, chunk.records) for chunk in index.chunks] == [(0, 0, 3), (1, 43, 2)]
    assert (index.records, index.file_bytes, index.torn) == (5, len(data), None)


@pytest.mark.parametrize("records", [SECOND, [MAGIC_BYTES, b"x" + MAGIC_BYTES * 3, MAGIC_BYTES[:2]]])
def test_a_damaged_size_of_the_last_chunk_is_not_torn(records: list[bytes], tmp_path: Path) -> None:
    """The whole payload is there though the header says more, also where it has bytes like the begin of a chunk."""
    damaged = bytearray(encode(records, Compressor.NONE))
    damaged[14] ^= 1
    with pytest.raises(CorruptChunk, match="the size is damaged"):
        read_index(_write(tmp_path / "file", bytes(damaged)), torn="skip")


def test_a_file_changed_after_its_index_is_refused(data: bytes, tmp_path: Path) -> None:
    """A chunk with another number of records than asked for, and an offset behind the file, are errors that say so."""
    path = _write(tmp_path / "file", data)

    with pytest.raises(CorruptChunk, match="has 3 records, not 2: was the file changed") as raised:
        read_chunk(path, 0, 7, records=2)
    assert (raised.value.chunk, raised.value.offset, raised.value.path) == (7, 0, str(path))
    with pytest.raises(CorruptChunk, match="was it changed"):
        read_chunk(path, len(data), 2)
    with pytest.raises(CorruptChunk, match="no chunk begins here"):
        read_chunk(path, 3, 1)


@pytest.mark.parametrize("tail", [b"garbage", b"x", b"\x04\x03\x02\x02", b"\x00" * 40])
def test_garbage_after_the_chunks_is_not_torn(data: bytes, tmp_path: Path, tail: bytes) -> None:
    """What follows the last chunk and does not begin like one is an error, also where torn chunks are skipped."""
    path = _write(tmp_path / "file", data + tail)

    with pytest.raises(CorruptChunk) as raised:
        read(path, "skip")
    assert (raised.value.chunk, raised.value.offset) == (2, len(data))


def test_a_chunk_over_the_limit_is_not_read(tmp_path: Path) -> None:
    """A chunk larger than the limit is refused, compressed or not, and the error says which limit."""
    for compressor in Compressor:
        path = _write(tmp_path / compressor.name, encode([b"\x00" * 100_000], compressor))
        with (
            RecordFile(path, max_chunk_bytes=99_999) as file,
            pytest.raises(ChunkTooLarge, match="max_chunk_bytes allows 99999"),
        ):
            file.chunk(0)


@pytest.mark.parametrize(
    ("chunk", "offset", "where"),
    [(None, None, ""), (0, None, "chunk 0: "), (None, 0, "offset 0: "), (3, 99, "chunk 3, offset 99: ")],
)
def test_an_error_says_what_is_known_and_survives_another_process(
    chunk: int | None, offset: int | None, where: str
) -> None:
    """Errors of record files are pickled whole, as data loaders do with them."""
    error = TornChunk("a.recordio", "cut", chunk=chunk, offset=offset)
    copy = pickle.loads(pickle.dumps(error))

    assert str(error) == str(copy) == f"a.recordio: {where}cut"
    assert (type(copy), copy.path, copy.problem, copy.chunk, copy.offset) == (
        TornChunk,
        "a.recordio",
        "cut",
        chunk,
        offset,
    )


def test_an_empty_file_has_no_chunk(tmp_path: Path) -> None:
    """An empty file is a file of no records, and a missing one is the system's error."""
    path = _write(tmp_path / "empty", b"")

    assert read(path) == ([], None)
    assert read_index(path).chunks == ()
    with pytest.raises(FileNotFoundError):
        read_index(tmp_path / "missing")


def peak_bytes(job: Callable[[], object]) -> int:
    """The most memory that a job had at once, beyond what was there."""
    tracemalloc.start()
    try:
        job()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("compressor", list(Compressor))
def test_memory_is_bounded_by_a_chunk(compressor: Compressor, tmp_path: Path) -> None:
    """Writing, reading and checking take a few chunks of memory, however many the file has."""
    path, chunk_bytes, chunks = tmp_path / "file", 200_000, 40
    record = random.Random(1).randbytes(1000)

    def write() -> None:
        with create_records(path, compressor=compressor, chunk_bytes=chunk_bytes) as out:
            out.write_all(record for _ in range(chunks * chunk_bytes // len(record)))

    def read() -> None:
        with RecordFile(path) as file:
            assert sum(len(each) for each in file) == chunks * chunk_bytes

    def scan() -> None:
        with RecordFile(path) as file:
            assert sum(isinstance(each, Chunk) for each in file.scan()) == chunks

    found = {job.__name__: peak_bytes(job) / chunk_bytes for job in (write, read, scan)}

    assert max(found.values()) < 6, found
    assert len(read_index(path).chunks) == chunks
