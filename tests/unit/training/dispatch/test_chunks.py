"""The list of chunks of a data set: its tasks, its stored form, and how two of them differ."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import msgspec
import pytest

from p2pnode.training.dispatch import chunks
from p2pnode.training.dispatch.chunks import (
    MAX_CHUNKS,
    BadDataset,
    ChunkTable,
    DatasetChunk,
    DatasetDamaged,
    RecordFilesMissing,
    difference,
    find_files,
    path_of,
    read_dataset,
)
from p2pnode.training.dispatch.messages import MAX_MESSAGE_BYTES
from tests.harness.builders.record_files import write_records


def table(**files: int) -> ChunkTable:
    return ChunkTable(
        DatasetChunk(path, index, 1000 * index, 7 + index) for path, chunks in files.items() for index in range(chunks)
    )


def test_tasks_are_runs_that_may_span_files() -> None:
    """Seven chunks of two files in tasks of three: the second task has chunks of both, the last one is smaller."""
    data = table(a=4, b=3)
    assert data.tasks(3) == 3
    assert [[(chunk.path, chunk.index) for chunk in data.of_task(task, 3)] for task in range(3)] == [
        [("a", 0), ("a", 1), ("a", 2)],
        [("a", 3), ("b", 0), ("b", 1)],
        [("b", 2)],
    ]


def test_a_stored_table_is_the_same_table() -> None:
    """Places of 64 bits, empty chunks and paths in any alphabet come back."""
    entries = [DatasetChunk("ä/ö.rec", 0, 2**40 + 3, 0), DatasetChunk("ä/ö.rec", 2**32 - 1, 5, 2**32 - 1)]
    data = ChunkTable(entries)
    again = ChunkTable.decode(data.encode())
    assert again.chunks == entries
    assert again.summary() == data.summary()


def test_a_damaged_table_is_refused() -> None:
    """No cut and no flipped bit is read as another table."""
    data = table(a=50, b=2)
    encoded = data.encode()
    for size in range(len(encoded)):
        with pytest.raises(DatasetDamaged):
            ChunkTable.decode(encoded[:size])
    for place in range(len(encoded)):
        damaged = bytearray(encoded)
        damaged[place] ^= 1
        try:
            other = ChunkTable.decode(bytes(damaged))
        except DatasetDamaged:
            continue
        assert other.chunks == data.chunks


def test_impossible_data_sets_are_refused_by_name() -> None:
    """No chunks, and a file named twice."""
    with pytest.raises(BadDataset, match="no chunk"):
        ChunkTable([])
    with pytest.raises(BadDataset, match="named twice"):
        ChunkTable([DatasetChunk("a", 0, 0, 1), DatasetChunk("b", 0, 0, 1), DatasetChunk("a", 1, 9, 1)])


@pytest.mark.parametrize(("count", "each"), [(1, 1), (511, 1), (512, 2), (2559, 9), (2560, 10), (100_000, 10)])
def test_a_large_data_set_has_ten_chunks_in_a_task_and_a_small_one_as_many_tasks_as_chunks(
    count: int, each: int
) -> None:
    """So there are tasks for all workers, and at most 52,429 of them."""
    assert table(a=count).chunks_per_task == each


def test_the_first_difference_is_named() -> None:
    """Another order, number of chunks, number of records, places, and files too many or too few."""
    registered = table(a=2, b=3).summary()
    assert difference(registered, table(a=2, b=3).summary()) == ""
    assert "file 0 is b, the registered one is a" in difference(registered, table(b=3, a=2).summary())
    assert "b has 4 chunks, the registered one has 3" in difference(registered, table(a=2, b=4).summary())
    moved = ChunkTable([DatasetChunk("a", 0, 0, 7), DatasetChunk("a", 1, 1001, 8)])
    fewer = ChunkTable([DatasetChunk("a", 0, 0, 7), DatasetChunk("a", 1, 1000, 7)])
    assert "a has its chunks at other places" in difference(registered, moved.summary())
    assert "a has 14 records, the registered one has 15" in difference(registered, fewer.summary())
    assert "b is only in the registered one" in difference(registered, table(a=2).summary())
    assert "c is only in the reported one" in difference(registered, table(a=2, b=3, c=1).summary())


def test_a_list_of_chunks_from_another_node_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in several runs, impossible paths and numbers, too many chunks and bytes without end are refused."""
    good = DatasetChunk("a", 0, 0, 1)
    for bad in (
        [],
        [good, DatasetChunk("b", 0, 0, 1), DatasetChunk("a", 1, 9, 1)],
        [DatasetChunk("", 0, 0, 1)],
        [DatasetChunk("x" * 4097, 0, 0, 1)],
        [DatasetChunk("a", 0, -1, 1)],
        [DatasetChunk("a", 0, 0, 1 << 63)],
    ):
        with pytest.raises(DatasetDamaged):
            ChunkTable.decode(zlib.compress(msgspec.msgpack.encode(bad)))
    ChunkTable.decode(table(a=1000).encode())
    monkeypatch.setattr(chunks, "MAX_CHUNKS", 999)
    with pytest.raises(DatasetDamaged, match="more than 999 chunks"):
        ChunkTable.decode(zlib.compress(msgspec.msgpack.encode([good] * 1000)))
    monkeypatch.setattr(chunks, "MAX_TABLE_BYTES", 999)
    with pytest.raises(DatasetDamaged, match="more than 999 bytes"):
        ChunkTable.decode(zlib.compress(msgspec.msgpack.encode([good] * 500)))


def test_the_largest_table_fits_a_request() -> None:
    """Places that compress badly, as of chunks of tens of megabytes: so many of them stay below the limit."""
    chosen, count = random.Random(1), MAX_CHUNKS // 64
    places = [DatasetChunk("a", index, chosen.getrandbits(45), chosen.randint(900, 1100)) for index in range(count)]
    assert 64 * len(ChunkTable(places).encode()) < MAX_MESSAGE_BYTES


def test_names_are_those_below_the_folder(tmp_path: Path) -> None:
    """Patterns are sorted within, follow each other as given, and a file counts once."""
    (tmp_path / "more").mkdir()
    for name in ("b.recordio", "a.recordio", "more/c.recordio"):
        write_records(tmp_path / name, [b"x"] * 7, 3)

    found = find_files(["more/*", "*.recordio", "a.recordio"], str(tmp_path))
    dataset = read_dataset(["**/*.recordio"], str(tmp_path))

    assert [file.name for file in found] == ["more/c.recordio", "a.recordio", "b.recordio"]
    assert [chunk.records for chunk in (dataset.table[number] for number in range(3))] == [3, 3, 1]
    assert dataset.paths["more/c.recordio"] == path_of("more/c.recordio", str(tmp_path))
    assert read_dataset([str(tmp_path / "a.recordio")], "/elsewhere").paths == {
        str(tmp_path / "a.recordio"): str(tmp_path / "a.recordio")
    }


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    """No pattern, a pattern without a file, and a file that is not whole."""
    path = write_records(tmp_path / "a.recordio", [b"abc"] * 7, 3)
    path.write_bytes(path.read_bytes()[:-2])

    for patterns, says in (
        ([], "names no file"),
        (["b*"], "matches no file in"),
        (["a*"], "is no whole RecordIO file"),
    ):
        with pytest.raises(RecordFilesMissing, match=says):
            read_dataset(patterns, str(tmp_path))
