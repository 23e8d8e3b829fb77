"""The record files of this machine: names that are equal on all nodes, their paths here, and their chunks.

`dispatch.records` has names or patterns below `training.data_dir`; without one, below the working directory. A file's
name is its path below that folder, so that nodes may keep the same files in different places. Functions here block.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from p2pnode.training.dispatch.chunks import ChunkTable, DatasetChunk
from p2pnode.training.dispatch.recordio import RecordFileError, read_index
from p2pnode.training.errors import TrainingError


class RecordFilesMissing(TrainingError):
    """A name or pattern of `dispatch.records` that matches no file, or a file that cannot be read. `hint` is the next
    step."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(f"{reason}; {hint}")
        self.reason = reason
        self.hint = hint


class NamedFile(NamedTuple):
    """A file by its name for all nodes, and its path on this one."""

    name: str
    path: str


def find_files(patterns: Sequence[str], folder: str) -> list[NamedFile]:
    """The files, in the order of the patterns and sorted within each. Raises `RecordFilesMissing`."""
    if not patterns:
        raise RecordFilesMissing(
            "dispatch.records names no file", 'set it to names or patterns, as dispatch.records = ["train-*.recordio"]'
        )
    found: dict[str, NamedFile] = {}
    for pattern in patterns:
        names = sorted(_matches(pattern, folder))
        if not names:
            raise RecordFilesMissing(
                f'dispatch.records: "{pattern}" matches no file in {folder}',
                "copy the files there, or set training.data_dir to the folder that has them",
            )
        for name in names:
            found.setdefault(name, NamedFile(name, path_of(name, folder)))
    return list(found.values())


def _matches(pattern: str, folder: str) -> Iterator[str]:
    for name in glob.glob(pattern, root_dir=folder, recursive=True):  # noqa: PTH207 - names below a folder
        if Path(path_of(name, folder)).is_file():
            yield Path(name).as_posix()


def path_of(name: str, folder: str) -> str:
    """Where a file of the data set is on this machine."""
    return os.path.normpath(os.path.join(folder, name))  # noqa: PTH118 - an absolute name stays as it is


class LocalDataset(NamedTuple):
    """The files of this machine: their chunks by name, and where each is."""

    table: ChunkTable
    paths: Mapping[str, str]


def read_dataset(patterns: Sequence[str], folder: str) -> LocalDataset:
    """The chunks of all files, from their headers. Raises `RecordFilesMissing` and `BadDataset`."""
    files = find_files(patterns, folder)
    table = ChunkTable(chunk for file in files for chunk in _chunks_of(file))
    return LocalDataset(table, {file.name: file.path for file in files})


def _chunks_of(file: NamedFile) -> Iterator[DatasetChunk]:
    try:
        index = read_index(file.path)
    except OSError as error:
        raise RecordFilesMissing(
            f"cannot read {file.path}: {error.strerror or error}", "see its permissions, or copy it again"
        ) from error
    except RecordFileError as error:
        raise RecordFilesMissing(
            f"{file.path} is no whole RecordIO file: {error}", "see `p2pnode records check`, and copy it again"
        ) from error
    for number, chunk in enumerate(index.chunks):
        yield DatasetChunk(file.name, number, chunk.offset, chunk.records)
