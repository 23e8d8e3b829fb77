"""`swarm.records` under a `DataLoader`, with a daemon in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from torch.utils.data import DataLoader

from p2pnode.training.dispatch.chunks import read_dataset
from p2pnode.training.trainer.connection import DaemonConnection
from p2pnode.training.trainer.ranks import Ranks
from p2pnode.training.trainer.records.dataset import RecordFileStream, SwarmRecords
from p2pnode.training.trainer.records.record_draws import RecordDraws
from p2pnode.training.trainer.records.task_source import DispatchedTasks
from p2pnode.training.trainer.sampling.shared_data import SharedData
from p2pnode.training.trainer_link.messages import Start
from p2pnode.training.trainer_link.record_messages import RecordSource
from tests.harness.builders.record_files import RecordConnection, tasks_of, write_records
from tests.harness.stubs.shared_data import DirectConnection, Script
from tests.unit.training.trainer.sampling.test_sampler import epoch, meet

RECORDS = [b"%d" % number for number in range(40)]


class Loop:
    """A script's loop: trains batches, and reports a turn after each, or when the data set asks for it."""

    def __init__(self, connection: RecordConnection, decode: Any = int) -> None:
        self.connection = connection
        self.flushed = 0
        self.turn = 0
        draws = RecordDraws(DispatchedTasks(cast(DaemonConnection, connection)), decode)
        self.records = SwarmRecords(draws, self.flush)

    def flush(self) -> bool:
        self.flushed += 1
        self.report()
        return False

    def report(self) -> None:
        self.turn += 1
        self.records.report(self.turn, self.turn, has_delta=True)

    def run(self, loader: Any, *, report: bool = True) -> list[list[int]]:
        batches = []
        for batch in loader:
            batches.append([int(sample) for sample in batch])
            self.records.count(len(batch))
            if report:
                self.report()
        return batches


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_records(tmp_path / "train.recordio", RECORDS, 5)


def test_an_iteration_trains_what_there_is_and_reports_it(path: Path) -> None:
    """All records of the tasks, decoded, with a smaller last batch; every task is reported to its end."""
    connection = RecordConnection(tasks_of(path, 3))
    loop = Loop(connection)

    batches = loop.run(DataLoader(loop.records, batch_size=16))

    assert [len(batch) for batch in batches] == [16, 16, 8]
    assert sorted(sample for batch in batches for sample in batch) == list(range(40))
    assert connection.trained == {0: 15, 1: 15, 2: 10}


def test_the_next_iteration_reports_first_and_then_waits(path: Path) -> None:
    """What a turn under way has trained is reported before the script waits for records that may depend on it."""
    first, second = tasks_of(path, 4)
    connection = RecordConnection([first])
    loop = Loop(connection)
    loop.run(DataLoader(loop.records, batch_size=8), report=False)
    assert connection.trained == {}
    seen: list[dict[int, int]] = []

    def flush() -> bool:
        loop.report()
        seen.append(dict(connection.trained))
        connection.tasks.append(second)
        return False

    loop.records._flush = flush
    batches = loop.run(DataLoader(loop.records, batch_size=8))

    assert seen == [{0: 20}]
    assert sum(len(batch) for batch in batches) == 20


def test_what_was_drawn_and_not_trained_comes_first_again(path: Path) -> None:
    """A loop that is left in the middle loses nothing and repeats nothing."""
    connection = RecordConnection(tasks_of(path, 4))
    loop = Loop(connection)
    seen = []
    for batch in DataLoader(loop.records, batch_size=6):
        if len(seen) == 18:
            break
        seen += batch.tolist()
        loop.records.count(len(batch))

    rest = [sample for batch in loop.run(DataLoader(loop.records, batch_size=6)) for sample in batch]

    assert seen + rest == list(range(40))
    assert connection.trained == {0: 20, 1: 20}


def test_a_stop_ends_an_iteration_that_waits(path: Path) -> None:
    """The node ends: the loop is left, and `stopped` says why."""
    connection = RecordConnection([])
    loop = Loop(connection)
    loop.records._flush = lambda: bool(setattr(connection, "stopping", True))

    assert loop.run(DataLoader(loop.records, batch_size=6)) == []
    assert loop.records.stopped


def test_a_record_that_cannot_be_decoded_fails_its_task_alone(path: Path) -> None:
    """The other tasks are trained; the failed one is named with the reason, and not drawn again."""

    def decode(record: bytes) -> int:
        if record == b"7":
            raise ValueError("no seven")
        return int(record)

    connection = RecordConnection(tasks_of(path, 1))
    loop = Loop(connection, decode)

    batches = loop.run(DataLoader(loop.records, batch_size=4))

    assert sorted(sample for batch in batches for sample in batch) == [n for n in range(40) if n not in (7, 8, 9)]
    (failed,) = connection.unreadable
    assert (failed.task, failed.missing) == (1, False)
    assert "ValueError: no seven" in failed.reason
    loop.records._flush = lambda: bool(setattr(connection, "stopping", True))
    assert loop.run(DataLoader(loop.records, batch_size=4)) == []
    assert len(connection.unreadable) == 1


@pytest.mark.parametrize("missing", [True, False])
def test_a_missing_file_is_said_to_be_missing_and_a_damaged_one_is_not(path: Path, missing: bool) -> None:
    """So that the master gives the task to another node."""
    tasks = tasks_of(path, 8)
    path.unlink() if missing else path.write_bytes(bytes(path.stat().st_size))
    connection = RecordConnection(tasks)
    loop = Loop(connection)
    loop.records._flush = lambda: bool(setattr(connection, "stopping", True))

    assert loop.run(DataLoader(loop.records, batch_size=4)) == []
    assert [(one.task, one.missing) for one in connection.unreadable] == [(0, missing)]
    assert "train.recordio" in connection.unreadable[0].reason


@pytest.mark.filterwarnings("ignore")
def test_workers_are_refused(path: Path) -> None:
    """`num_workers` above 0 raises and says what to do."""
    loop = Loop(RecordConnection(tasks_of(path, 8)))

    with pytest.raises(RuntimeError, match="num_workers=0"):
        next(iter(DataLoader(loop.records, batch_size=4, num_workers=1)))


def test_a_loader_that_always_drops_the_same_records_is_told(path: Path) -> None:
    """Records that no iteration trains would keep the pass open for ever."""
    connection = RecordConnection(tasks_of(path, 8))
    loop = Loop(connection)
    loader = DataLoader(loop.records, batch_size=25, drop_last=True)
    assert len(loop.run(loader)) == 1

    with pytest.raises(RuntimeError, match="drop_last=False"):
        [loop.run(loader) for _ in range(5)]


MANY = [b"%d" % number for number in range(300)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_records(tmp_path / "a.recordio", MANY[:170], 20)
    write_records(tmp_path / "b.recordio", MANY[170:], 30)
    return tmp_path


def start(folder: Path, source: Any) -> Start:
    records = RecordSource(source, ["*.recordio"], str(folder), True, 0, 7)
    return Start("", "", {}, "cpu", 0, 7, 1, 1, 0, records)


def test_the_stream_skips_without_reading(folder: Path) -> None:
    """The records of all files in order, from any place; chunks before it are not opened."""
    stream = RecordFileStream(read_dataset(["*.recordio"], str(folder)), int)
    assert list(stream) == list(range(300))
    (folder / "a.recordio").unlink()

    assert list(stream.skip(170)) == list(range(170, 300))
    assert list(stream.skip(100).skip(185)) == list(range(285, 300))


def test_two_nodes_share_the_records_without_a_master(folder: Path) -> None:
    """`source = "shared"`: together every record once."""
    scripts = [Script(DirectConnection(name * 20)) for name in (b"a", b"b")]
    for script in scripts:
        script.data.begin(start(folder, "shared"))
    loaders = [DataLoader(script.data.records(int, lambda: None), batch_size=10) for script in scripts]
    meet(*scripts)

    parts = [epoch(script, loader) for script, loader in zip(scripts, loaders, strict=True)]

    assert sorted(parts[0] + parts[1]) == list(range(300))
    assert all(parts)


@pytest.mark.parametrize(
    ("source", "ranks", "says"),
    [(None, 1, "no records are set"), ("master", 2, "under torchrun"), ("local", 1, "matches no file")],
)
def test_what_is_not_possible_is_said(tmp_path: Path, source: str | None, ranks: int, says: str) -> None:
    """Nothing set, several ranks, files that are not there; and a second data set beside the records."""
    data = SharedData(Ranks(0, ranks, "cpu"), cast(DaemonConnection, RecordConnection([])), lambda *_: None)
    if source is not None:
        data.begin(start(tmp_path, source))

    with pytest.raises(ValueError, match=says):
        data.records(None, lambda: None)


def test_records_are_the_only_data_of_a_script(folder: Path) -> None:
    """`swarm.step` counts one of them."""
    data = SharedData(Ranks(), cast(DaemonConnection, RecordConnection([])), lambda *_: None)
    data.begin(start(folder, "local"))
    data.records(None, lambda: None)

    with pytest.raises(ValueError, match="shares a data set already"):
        data.sampler(10, shuffle=True, nodes=1.0)
