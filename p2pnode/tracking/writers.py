"""Writes records as a CSV table, as TensorBoard events, or to trackio. Runs in a thread of its own and may block.

The libraries are imported by the writer that needs them.
"""

from __future__ import annotations

import csv
import fcntl
import os
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from p2pnode.config.tracker import Kind

#: The first columns of a table. Those of values follow in the order in which their names first appear.
FIRST_COLUMNS = ["time", "step"]


class Record(NamedTuple):
    """Numbers of one step at one time (`wall_s`: seconds since 1970)."""

    step: int
    wall_s: float
    values: dict[str, float]


class TrackerWriter(Protocol):
    """Every method may raise any exception; the writer is then given up."""

    def write(self, record: Record) -> None: ...

    def flush(self) -> None:
        """What was written can be read by others now."""
        ...

    def close(self) -> None: ...


class CsvWriter:
    """Appends to one table. A new name of a value becomes a new column, for which the table is written again."""

    def __init__(self, path: Path) -> None:
        """Raises `OSError`, and `ValueError` for a file that another process writes or that is no such table."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._open()
        with path.open(newline="", encoding="utf-8") as file:
            self._columns = next(csv.reader(file), [])
        if not self._columns:
            self._columns = list(FIRST_COLUMNS)
            self._rows.writerow(self._columns)
        elif self._columns[: len(FIRST_COLUMNS)] != FIRST_COLUMNS:
            self._file.close()
            raise ValueError(f"{path} is another table: its first columns are not {', '.join(FIRST_COLUMNS)}")
        elif _is_cut_off(path):
            self._file.write("\n")

    def _open(self) -> None:
        self._file = self._path.open("a", newline="", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(f"another node writes to {self._path}: give each node a file of its own") from None
        self._rows = csv.writer(self._file, lineterminator="\n")

    def write(self, record: Record) -> None:
        new = [name for name in record.values if name not in self._columns]
        if new:
            self._add_columns(new)
        cells: dict[str, Any] = {"time": round(record.wall_s, 3), "step": record.step, **record.values}
        self._rows.writerow([cells.get(name, "") for name in self._columns])

    def _add_columns(self, names: list[str]) -> None:
        self._file.flush()
        self._columns = [*self._columns, *names]
        beside = self._path.with_name(self._path.name + ".tmp")
        with (
            self._path.open(newline="", encoding="utf-8") as old,
            beside.open("w", newline="", encoding="utf-8") as new,
        ):
            rows = csv.reader(old)
            table = csv.writer(new, lineterminator="\n")
            table.writerow(self._columns)
            next(rows)
            for row in rows:
                table.writerow(row + [""] * (len(self._columns) - len(row)))
            new.flush()
            os.fsync(new.fileno())
        beside.replace(self._path)
        self._file.close()
        self._open()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _is_cut_off(path: Path) -> bool:
    """Whether the last row has no end: its node was killed, or its disk was full."""
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


class TensorBoardWriter:
    """Scalars in a folder per node below the given one, so that TensorBoard shows the nodes of one folder together."""

    def __init__(self, folder: Path, name: str) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder / name))

    def write(self, record: Record) -> None:
        for name, value in record.values.items():
            self._writer.add_scalar(name, value, record.step, walltime=record.wall_s)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class TrackioWriter:
    """A project per run of the swarm, and a trackio run per node, continued after a restart."""

    def __init__(self, run: str, name: str) -> None:
        import trackio

        self._trackio = trackio
        trackio.init(project=run, name=name, resume="allow")

    def write(self, record: Record) -> None:
        self._trackio.log(dict(record.values), step=record.step)

    def flush(self) -> None:
        """trackio sends what it got by itself."""

    def close(self) -> None:
        self._trackio.finish()


def open_writer(kind: Kind, path: Path, run: str, name: str) -> TrackerWriter:
    """`path`: a file for "csv", a folder for "tensorboard". `name`: of this node. Raises what the library raises."""
    match kind:
        case "csv":
            return CsvWriter(path)
        case "tensorboard":
            return TensorBoardWriter(path, name)
        case "trackio":
            return TrackioWriter(run, name)
