"""The order in which the records of a task are read."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from p2pnode.training.dispatch.recordio import CorruptChunk
from p2pnode.training.trainer.records.record_draws import places_in_order, records_in_order
from tests.harness.builders.record_files import tasks_of, write_records

RECORDS = [b"%d" % number for number in range(23)]


def test_every_record_comes_once_in_an_order_of_the_seed(tmp_path: Path) -> None:
    """With order 0 as in the file; otherwise permuted, another way with another seed, the same way with the same."""
    path = write_records(tmp_path / "a", RECORDS, 5)
    (task,) = tasks_of(path, 10)
    shuffled = {order: list(records_in_order(msgspec.structs.replace(task, order=order))) for order in (1, 2, 99)}

    assert list(records_in_order(task)) == RECORDS
    assert all(sorted(found) == sorted(RECORDS) for found in shuffled.values())
    assert len({tuple(found) for found in [RECORDS, *shuffled.values()]}) == 4
    assert shuffled[1] == list(records_in_order(msgspec.structs.replace(task, order=1)))


@pytest.mark.parametrize("order", [0, 7])
@pytest.mark.parametrize("skip", [0, 1, 5, 11, 22, 23])
def test_a_task_goes_on_where_another_attempt_stopped(tmp_path: Path, order: int, skip: int) -> None:
    """The rest after `skip` is the end of the same order."""
    (task,) = tasks_of(write_records(tmp_path / "a", RECORDS, 5), 10, order)

    rest = list(records_in_order(msgspec.structs.replace(task, skip=skip)))

    assert rest == list(records_in_order(task))[skip:]


def test_skipped_chunks_are_not_read(tmp_path: Path) -> None:
    """A task whose first chunks are trained needs their bytes no more."""
    (task,) = tasks_of(write_records(tmp_path / "a", RECORDS, 5), 10)
    broken = msgspec.structs.replace(task.chunks[0], path=str(tmp_path / "gone"))

    found = msgspec.structs.replace(task, skip=5, chunks=[broken, *task.chunks[1:]])

    assert list(records_in_order(found)) == RECORDS[5:]
    assert len(list(places_in_order(found))) == 18


def test_a_changed_or_missing_file_is_an_error(tmp_path: Path) -> None:
    """A file that lacks, and one whose chunk has another number of records, are refused."""
    path = write_records(tmp_path / "a", RECORDS, 5)
    (task,) = tasks_of(path, 10)
    write_records(path, RECORDS, 4)

    with pytest.raises(CorruptChunk):
        list(records_in_order(task))
    path.unlink()
    with pytest.raises(FileNotFoundError):
        list(records_in_order(task))
