"""The list of chunks of a data set: its tasks, its stored form, and how two of them differ."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from training.dispatch import chunks
from training.dispatch.chunks import BadDataset, ChunkTable, DatasetChunk, DatasetDamaged, difference, digest_of


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
    """Places of 64 bits, empty chunks and paths in any alphabet come back; neighbours compress well."""
    entries = [DatasetChunk("ä/ö.rec", 0, 2**40 + 3, 0), DatasetChunk("ä/ö.rec", 2**32 - 1, 5, 2**32 - 1)]
    data = ChunkTable(entries)
    again = ChunkTable.decode(data.encode())
    assert [again[0], again[1]] == entries
    assert again.summary() == data.summary()
    assert len(table(a=100_000).encode()) < 12_000


def test_a_damaged_table_is_refused() -> None:
    """No cut, and no change of its beginning, is read as another table under the same digest."""
    data = table(a=50, b=2)
    encoded = data.encode()
    for size in range(len(encoded)):
        with pytest.raises(DatasetDamaged):
            ChunkTable.decode(encoded[:size])
    changed = 0
    for place in range(len(encoded)):
        damaged = bytearray(encoded)
        damaged[place] ^= 1
        try:
            other = ChunkTable.decode(bytes(damaged))
        except DatasetDamaged:
            continue
        same = [other[number] for number in range(len(other))] == [data[number] for number in range(len(data))]
        assert same == (digest_of(other.summary()) == digest_of(data.summary()))
        changed += not same
    assert changed


def test_impossible_data_sets_are_refused_by_name() -> None:
    """No chunks, a file named twice, numbers out of range, and paths of no or endless length."""
    bad = {
        "no chunk": [],
        "named twice": [DatasetChunk("a", 0, 0, 1), DatasetChunk("b", 0, 0, 1), DatasetChunk("a", 1, 9, 1)],
        "offset=-1": [DatasetChunk("a", 0, -1, 1)],
        "records=4294967296": [DatasetChunk("a", 0, 0, 2**32)],
        "1 to 4096 bytes": [DatasetChunk("", 0, 0, 1)],
        "4096 bytes": [DatasetChunk("x" * 4097, 0, 0, 1)],
    }
    for reason, entries in bad.items():
        with pytest.raises(BadDataset, match=reason):
            ChunkTable(entries)


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
    """Files in several runs, paths without chunks, paths named twice or too long, and endless columns are refused."""

    def changed(change: Callable[[ChunkTable], object]) -> bytes:
        data = table(a=2, b=2)
        change(data)
        return data.encode()

    bad = (
        lambda data: data.files.__setitem__(3, 0),
        lambda data: data.files.__setitem__(0, 1),
        lambda data: data.files.__setitem__(3, 2),
        lambda data: data.paths.append("c"),
        lambda data: data.paths.__setitem__(1, "a"),
        lambda data: data.paths.__setitem__(1, ""),
        lambda data: data.paths.__setitem__(1, "x" * 4097),
        lambda data: data.records.append(1),
    )
    for change in bad:
        with pytest.raises(DatasetDamaged):
            ChunkTable.decode(changed(change))
    monkeypatch.setattr(chunks, "MAX_CHUNKS", 1000)
    ChunkTable.decode(table(a=1000).encode())
    longer = [DatasetChunk("a", index, 0, 1) for index in range(1001)]
    monkeypatch.setattr(chunks, "MAX_CHUNKS", 2000)
    encoded = ChunkTable(longer).encode()
    monkeypatch.setattr(chunks, "MAX_CHUNKS", 1000)
    with pytest.raises(DatasetDamaged, match="more than 1000 chunks"):
        ChunkTable.decode(encoded)
