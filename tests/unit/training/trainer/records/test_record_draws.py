"""Records are drawn, and count as trained in the order of drawing; what was not trained is drawn again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from p2pnode.training.trainer.connection import DaemonConnection
from p2pnode.training.trainer.records.record_draws import RecordDraws
from p2pnode.training.trainer.records.task_source import DispatchedTasks
from tests.harness.builders.record_files import RecordConnection, tasks_of, write_records


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_records(tmp_path / "train.recordio", [b"%d" % number for number in range(10)], 2)


def draws_of(connection: RecordConnection, decode: Any = int) -> RecordDraws:
    return RecordDraws(DispatchedTasks(cast(DaemonConnection, connection)), decode)


def drawn(draws: RecordDraws, count: int) -> list[Any]:
    found = [draws.draw(wait=False) for _ in range(count)]
    return [None if one is None else one[0] for one in found]


def test_records_come_task_after_task_and_then_none(path: Path) -> None:
    """Without a decoder they are bytes."""
    connection = RecordConnection(tasks_of(path, 2), ends=True)
    draws = draws_of(connection)

    assert drawn(draws, 11) == [*range(10), None]
    assert (draws.untrained, draws.pass_number) == (10, 1)
    assert draws_of(RecordConnection(tasks_of(path, 5)), None).draw(wait=False) == (b"0",)


def test_what_is_trained_is_counted_in_the_order_of_drawing_and_reported_once(path: Path) -> None:
    """A task is known until its last record; more than was drawn is said."""
    connection = RecordConnection(tasks_of(path, 2), ends=True)
    draws = draws_of(connection)
    drawn(draws, 6)

    assert draws.count(5) == 0
    draws.report(1, 1)
    assert connection.trained == {0: 4, 1: 1}
    connection.trained.clear()
    draws.report(2, 2)
    assert connection.trained == {}
    assert draws.count(3) == 2
    draws.report(3, 3)
    assert connection.trained == {1: 2}


def test_after_a_restart_the_rest_comes_first_and_begun_tasks_before_others(path: Path) -> None:
    """No record is lost, and none that was trained comes again."""
    connection = RecordConnection(tasks_of(path, 2), ends=True)
    draws = draws_of(connection)
    drawn(draws, 9)
    draws.count(5)
    draws.restart()

    assert draws.untrained == 0
    assert drawn(draws, 6) == [5, 6, 7, 8, 9, None]
    draws.finish()
    draws.report(1, 1)
    assert connection.trained == {0: 4, 1: 4, 2: 2}


def test_a_task_whose_record_cannot_be_decoded_is_given_up_with_what_was_drawn(path: Path) -> None:
    """The next task follows; the reason has the error's type."""

    def decode(record: bytes) -> int:
        if record == b"3":
            raise ValueError("no three")
        return int(record)

    connection = RecordConnection(tasks_of(path, 2), ends=True)
    draws = draws_of(connection, decode)

    assert drawn(draws, 10) == [0, 1, 2, 4, 5, 6, 7, 8, 9, None]
    assert [(one.task, one.reason, one.missing) for one in connection.unreadable] == [
        (0, "decode raised ValueError: no three", False)
    ]


def test_a_file_that_is_not_there_is_missing_and_a_damaged_one_is_not(path: Path) -> None:
    """The master gives a missing one to another node."""
    missing, damaged = tasks_of(path, 5)[0], tasks_of(path, 5)[0]
    other = path.with_name("other.recordio")
    other.write_bytes(path.read_bytes()[:-1] + b"!")
    connection = RecordConnection([damaged], ends=True)
    connection.tasks[0].chunks[:] = [chunk.__class__(str(other), *chunk_rest(chunk)) for chunk in damaged.chunks]
    assert len(drawn(draws_of(connection), 11)) == 11
    gone = RecordConnection([missing], ends=True)
    path.unlink()
    assert drawn(draws_of(gone), 1) == [None]

    assert [one.missing for one in connection.unreadable] == [False]
    assert [one.missing for one in gone.unreadable] == [True]
    assert str(path) in gone.unreadable[0].reason


def chunk_rest(chunk: Any) -> tuple[int, int, int]:
    return chunk.index, chunk.offset, chunk.records
