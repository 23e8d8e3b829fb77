"""Opens the records of a trainer: where they come from, and a fault that says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from p2pnode.training.trainer.connection import DaemonConnection
from p2pnode.training.trainer.records.task_source import DispatchedTasks, LocalTasks, open_files, open_tasks
from p2pnode.training.trainer_link.interface import TrainerFailed
from p2pnode.training.trainer_link.record_messages import RecordSource
from tests.harness.builders.record_files import RecordConnection, write_records


def source(kind: Any, folder: Path, *patterns: str) -> RecordSource:
    return RecordSource(kind, list(patterns), str(folder), shuffle=True, passes=1, seed=0)


def opened(of: RecordSource) -> Any:
    return open_tasks(of, 1, cast(DaemonConnection, RecordConnection([])))


def test_tasks_come_from_the_master_or_from_the_files_of_this_machine(tmp_path: Path) -> None:
    """The master's need no file here."""
    write_records(tmp_path / "a.recordio", [b"x"] * 7, 3)

    assert isinstance(opened(source("master", tmp_path)), DispatchedTasks)
    assert isinstance(opened(source("local", tmp_path, "*.recordio")), LocalTasks)
    assert len(open_files(source("shared", tmp_path, "*.recordio")).table) == 3


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
