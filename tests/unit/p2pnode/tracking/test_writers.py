"""What trackers' writers leave behind: read back with the readers of those formats."""

from __future__ import annotations

import csv
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2pnode.tracking.writers import CsvWriter, Record, open_writer


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_table_grows_by_rows_and_columns(tmp_path: Path) -> None:
    """A value with a new name gets a column; earlier rows are empty there, and no row is lost."""
    path = tmp_path / "below" / "steps.csv"
    writer = open_writer("csv", path, "digits", "a1")
    writer.write(Record(1, 10.0, {"loss": 2.0}))
    writer.write(Record(2, 11.0, {"loss": 1.0, "eval/accuracy": 0.5}))
    writer.write(Record(3, 12.0, {"eval/accuracy": 0.75}))
    writer.flush()

    assert table(path) == [
        {"time": "10.0", "step": "1", "loss": "2.0", "eval/accuracy": ""},
        {"time": "11.0", "step": "2", "loss": "1.0", "eval/accuracy": "0.5"},
        {"time": "12.0", "step": "3", "loss": "", "eval/accuracy": "0.75"},
    ]
    assert [file.name for file in path.parent.iterdir()] == ["steps.csv"]
    writer.close()


def test_a_table_goes_on_after_a_restart(tmp_path: Path) -> None:
    """The file of an earlier start keeps its rows and columns."""
    path = tmp_path / "steps.csv"
    for step, name in ((1, "loss"), (2, "samples")):
        writer = CsvWriter(path)
        writer.write(Record(step, 0.0, {name: step}))
        writer.close()

    assert [(row["step"], row["loss"], row["samples"]) for row in table(path)] == [("1", "1", ""), ("2", "", "2")]


def test_a_row_that_was_cut_off_spoils_no_further_one(tmp_path: Path) -> None:
    """A node that is killed, or whose disk is full, may leave a part of a row."""
    path = tmp_path / "steps.csv"
    path.write_text("time,step,loss\n1.0,1,0.5\n2.0,2,0.")
    writer = CsvWriter(path)
    writer.write(Record(3, 3.0, {"loss": 0.25}))
    writer.close()

    assert [(row["step"], row["loss"]) for row in table(path)] == [("1", "0.5"), ("2", "0."), ("3", "0.25")]


def test_a_table_has_one_writer(tmp_path: Path) -> None:
    """A second node at the same file is told so; also after the table was written again for a column."""
    writer = CsvWriter(tmp_path / "steps.csv")
    for _ in range(2):
        with pytest.raises(ValueError, match="another node writes to"):
            CsvWriter(tmp_path / "steps.csv")
        writer.write(Record(1, 0.0, {"loss": 1.0}))
    writer.close()


def test_another_table_is_not_overwritten(tmp_path: Path) -> None:
    """A file with other columns is refused, and stays as it is."""
    path = tmp_path / "mine.csv"
    path.write_text("name,age\nAda,36\n")

    with pytest.raises(ValueError, match="another table"):
        CsvWriter(path)
    assert path.read_text() == "name,age\nAda,36\n"


def events(path: Path) -> list[Any]:
    """The events of a TFRecord file: length, its checksum, data, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    data, found, at = path.read_bytes(), [], 0
    while at < len(data):
        [size] = struct.unpack_from("<Q", data, at)
        found.append(Event.FromString(data[at + 12 : at + 12 + size]))
        at += 16 + size
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_scalars_in_a_folder_of_this_node(tmp_path: Path) -> None:
    """Each value is a scalar of its name, step and time, below the folder of the node."""
    pytest.importorskip("tensorboardX")
    writer = open_writer("tensorboard", tmp_path, "digits", "a1b2")
    writer.write(Record(7, 1234.5, {"loss": 0.5, "eval/accuracy": 0.25}))
    writer.flush()
    writer.close()

    [file] = (tmp_path / "a1b2").iterdir()
    scalars = {
        value.tag: (event.step, event.wall_time, value.simple_value)
        for event in events(file)
        for value in event.summary.value
    }
    assert scalars == {"loss": (7, 1234.5, 0.5), "eval/accuracy": (7, 1234.5, 0.25)}


def test_trackio_gets_a_run_per_node_in_the_project_of_the_swarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that trackio documents: init, log with the step, finish."""
    calls: list[Any] = []
    stub = SimpleNamespace(
        init=lambda **arguments: calls.append(("init", arguments)),
        log=lambda values, step: calls.append(("log", values, step)),
        finish=lambda: calls.append(("finish",)),
    )
    monkeypatch.setitem(sys.modules, "trackio", stub)

    writer = open_writer("trackio", Path(), "digits", "a1b2")
    writer.write(Record(3, 0.0, {"loss": 1.0}))
    writer.flush()
    writer.close()

    assert calls == [
        ("init", {"project": "digits", "name": "a1b2", "resume": "allow"}),
        ("log", {"loss": 1.0}, 3),
        ("finish",),
    ]
