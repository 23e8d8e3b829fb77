"""Where tasks come from: requests to the master that are not answered at once, and passes over local files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2pnode.training.trainer.connection import DaemonConnection
from p2pnode.training.trainer.records import task_source
from p2pnode.training.trainer.records.task_source import NOT_NOW_S, DispatchedTasks, LocalTasks, open_files, open_tasks
from p2pnode.training.trainer_link.interface import TrainerFailed
from p2pnode.training.trainer_link.record_messages import (
    RecordsGranted,
    RecordsOpened,
    RecordSource,
    RecordsWanted,
    RecordTask,
    TaskTrained,
)
from tests.harness.builders.record_files import RecordConnection, tasks_of, write_records

TASK = RecordTask(4, 2, 1, 0, 0, [])


class Slow(RecordConnection):
    """Answers nothing by itself: `late` has what comes, each after half a second, or None."""

    def __init__(self, *late: RecordsGranted | None) -> None:
        super().__init__([])
        self.late = list(late)
        self.now_s = 0.0

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def answer(self, *given: Any) -> RecordsGranted | None:
        _kind, number, gives_up = given
        while self.late:
            self.now_s += 0.5
            found = self.late.pop(0)
            if found is not None and found.number == number:
                return found
            if gives_up():
                return None
        return None


def dispatched(connection: RecordConnection) -> DispatchedTasks:
    return DispatchedTasks(cast(DaemonConnection, connection))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_records(tmp_path / "train.recordio", [b"%d" % number for number in range(12)], 2)


def source_of(path: Path, *, shuffle: bool = True, passes: int = 2) -> RecordSource:
    return RecordSource("local", [path.name], str(path.parent), shuffle, passes, 0)


def local(source: RecordSource, node_seed: int, connection: RecordConnection | None = None) -> LocalTasks:
    return LocalTasks(source, node_seed, cast(DaemonConnection, connection or RecordConnection([])))


def numbers(tasks: LocalTasks, count: int) -> list[int | None]:
    """The chunks of the next tasks."""
    found = [tasks.next_task(wait=False) for _ in range(count)]
    return [None if task is None else task.chunks[0].index for task in found]


def test_a_request_stays_open_until_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that has something to report waits a moment only. A second request could be granted a second task."""
    connection = Slow(None, None, None, None, RecordsGranted(9, None, is_over=False), RecordsGranted(1, TASK, False))
    monkeypatch.setattr(task_source, "time", SimpleNamespace(monotonic=lambda: connection.now_s))
    tasks = dispatched(connection)

    assert tasks.next_task(wait=False) is None
    assert connection.now_s == NOT_NOW_S
    assert tasks.next_task(wait=True) == TASK
    assert connection.sent == [RecordsOpened(), RecordsWanted(1, False)]
    connection.late = [RecordsGranted(2, None, is_over=True)]
    assert tasks.next_task(wait=True) is None


@pytest.mark.parametrize("how", ["stopping", "lost", "cancelled"])
def test_a_wait_ends_with_the_node_or_the_order(how: str) -> None:
    """None then; an order that was cancelled leaves the request open."""
    connection = RecordConnection([])
    setattr(connection, how, True)
    tasks = dispatched(connection)

    assert tasks.next_task(wait=True) is None
    assert tasks.stopped == (how != "cancelled")


def test_every_pass_has_every_chunk_in_an_order_of_its_own(path: Path) -> None:
    """Another node has another order; without shuffling it is that of the file."""
    tasks = local(source_of(path), 1)
    first, second = numbers(tasks, 6), numbers(tasks, 6)

    assert sorted(first) == sorted(second) == list(range(6))  # type: ignore[type-var]
    assert first != second
    assert numbers(local(source_of(path), 2), 6) != first
    assert numbers(tasks, 1) == [None]
    plain = local(source_of(path, shuffle=False, passes=0), 1)
    assert numbers(plain, 13) == [*range(6), *range(6), 0]


def test_the_records_of_a_task_are_permuted_only_where_they_are_shuffled(path: Path) -> None:
    """Order 0 is that of the file; passes are counted from 1."""
    shuffled = [local(source_of(path), 6).next_task(wait=False)]
    plain = local(source_of(path, shuffle=False), 6).next_task(wait=False)
    assert shuffled[0] is not None
    assert plain is not None

    assert (shuffled[0].order % 2, plain.order) == (1, 0)
    assert (plain.task, plain.pass_number, plain.skip) == (0, 1, 0)


def test_a_saved_position_is_gone_on_from(path: Path) -> None:
    """The task that is not wholly trained comes again, without what is trained of it."""
    tasks = local(source_of(path), 1)
    given = [tasks.next_task(wait=False) for _ in range(4)]
    tasks.report(1, 1, [TaskTrained(1, 1, 2), TaskTrained(2, 1, 1)])
    tasks.report(2, 2, [])
    state = tasks.state()
    assert state is not None

    again = local(source_of(path), 1)
    again.restore(state)
    found = [again.next_task(wait=False) for _ in range(2)]
    assert given[2] is not None
    assert found[0] is not None
    assert (found[0].task, found[0].skip, found[0].chunks) == (2, 1, given[2].chunks)
    assert found[1] == given[3]


def test_a_position_of_other_files_is_refused(path: Path, tmp_path: Path) -> None:
    """With both numbers of chunks; and what is no position."""
    other = local(source_of(write_records(tmp_path / "other.recordio", [b"x"] * 3, 1)), 1).state()
    assert other is not None
    tasks = local(source_of(path), 1)
    with pytest.raises(ValueError, match="records with 3 chunks, and these have 6"):
        tasks.restore(other)
    with pytest.raises(ValueError, match="no position in records"):
        tasks.restore("[]")


def test_a_local_task_that_cannot_be_read_ends_the_trainer(path: Path) -> None:
    """Nobody else has it; the file is named."""
    tasks = local(source_of(path), 1)
    task = tasks.next_task(wait=False)
    assert task is not None
    with pytest.raises(OSError, match=rf"cannot go on in {path}: broken"):
        tasks.give_up(task, "broken", missing=False)


def test_a_node_that_stops_gives_no_local_task(path: Path) -> None:
    """One that goes on does."""
    connection = RecordConnection(tasks_of(path, 1))
    tasks = local(source_of(path), 1, connection)
    assert not local(source_of(path), 1).stopped
    connection.stopping = True

    assert tasks.next_task(wait=True) is None


def source(kind: Any, folder: Path, *patterns: str) -> RecordSource:
    return RecordSource(kind, list(patterns), str(folder), shuffle=True, passes=1, seed=0)


def opened(of: RecordSource) -> Any:
    return open_tasks(of, 1, cast(DaemonConnection, RecordConnection([])))


def test_files_that_are_missing_or_damaged_are_a_failure_for_good(tmp_path: Path) -> None:
    """Both ways to open them; a restart would find the same."""
    path = write_records(tmp_path / "a.recordio", [b"abc"] * 7, 3)
    path.write_bytes(path.read_bytes()[:-2])
    for pattern, reason in (("b*", "matches no file"), ("a*", "no whole RecordIO file")):
        for attempt in (opened, open_files):
            with pytest.raises(TrainerFailed, match=reason) as failed:
                attempt(source("local", tmp_path, pattern))
            assert failed.value.fatal
            assert failed.value.hint
