"""The chunks of a data set: those in the record files of this machine, and a digest to compare them with other nodes'.

A data set never changes, so it is stored once and apart from the state of the queue. Its chunks are in the order of the
files as they were named, and of the chunks inside each.

`dispatch.records` has names or patterns below `training.data_dir`; without one, below the working directory. A file's
name is its path below that folder, so that nodes may keep the same files in different places. `find_files` and
`read_dataset` block, and the rest is pure.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from p2pnode.training.dispatch.recordio import RecordFileError, read_index
from p2pnode.training.errors import TrainingError

#: Refused above: all of them are in memory, 150 bytes each, and reach the master in one request, ten bytes each at most
#: (`training.dispatch.messages.MAX_MESSAGE_BYTES`).
MAX_CHUNKS = 1 << 19
MAX_PATH_BYTES = 4096
#: A data set has so many tasks, or as many as it has chunks; a larger one this many chunks in each.
USUAL_TASKS, LARGEST_TASK = 256, 10
#: A table may come from another node: a few bytes must not become gigabytes.
MAX_TABLE_BYTES = 256 << 20

#: Of a file, or of a chunk.
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class BadDataset(TrainingError):
    """A list of chunks that no queue can be made of; the text says which entry and why."""


class DatasetDiffers(TrainingError):
    """Another data set than the registered one; the text names the first difference."""


class DatasetDamaged(TrainingError):
    """The stored list of chunks cannot be read back."""


class DatasetChunk(msgspec.Struct, frozen=True, array_like=True):
    """One chunk of a RecordIO file: `index` counts the file's chunks from 0, `offset` is that of its header. `path` is
    the file's name on all nodes, or where this machine has it."""

    path: Annotated[str, Meta(min_length=1, max_length=MAX_PATH_BYTES)]
    index: Number
    offset: Number
    records: Number


class FileSummary(msgspec.Struct, frozen=True, array_like=True):
    """What is compared of one file: its path, its chunks and records, and a digest of their places."""

    path: str
    chunks: int
    records: int
    digest: bytes


class ChunkTable:
    """The chunks of a data set. Build it off the event loop: half a million chunks take a second.

    Raises `BadDataset` for no chunks, too many, or a path that comes back.
    """

    def __init__(self, chunks: Iterable[DatasetChunk]) -> None:
        self.chunks = list(itertools.islice(chunks, MAX_CHUNKS + 1))
        if not self.chunks:
            raise BadDataset("the data set has no chunk: there is nothing to train on")
        if len(self.chunks) > MAX_CHUNKS:
            raise BadDataset(f"more than {MAX_CHUNKS} chunks: write larger chunks, or use several runs")
        paths = [path for path, _ in self._files()]
        twice = [path for number, path in enumerate(sorted(paths)[1:]) if path == sorted(paths)[number]]
        if twice:
            raise BadDataset(f"the chunks of {twice[0]} are not next to each other: is the file named twice?")

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, number: int) -> DatasetChunk:
        return self.chunks[number]

    def _files(self) -> Iterable[tuple[str, Iterable[DatasetChunk]]]:
        return itertools.groupby(self.chunks, key=lambda chunk: chunk.path)

    @property
    def chunks_per_task(self) -> int:
        """So many that there are tasks for all workers and few leases for the master."""
        return max(1, min(LARGEST_TASK, len(self) // USUAL_TASKS))

    def of_task(self, task: int, chunks_per_task: int) -> list[DatasetChunk]:
        """The chunks of a task: a run of the data set, which may span files."""
        return self.chunks[task * chunks_per_task : (task + 1) * chunks_per_task]

    def tasks(self, chunks_per_task: int) -> int:
        """How many tasks there are; the last one may be smaller."""
        return -(-len(self) // chunks_per_task)

    def summary(self) -> list[FileSummary]:
        """One entry per file, in order."""
        found = []
        for path, group in self._files():
            chunks = list(group)
            places = msgspec.msgpack.encode([(one.index, one.offset, one.records) for one in chunks])
            records = sum(chunk.records for chunk in chunks)
            found.append(FileSummary(path, len(chunks), records, hashlib.sha256(places).digest()[:16]))
        return found

    def encode(self) -> bytes:
        """The table for a store, compressed."""
        return zlib.compress(msgspec.msgpack.encode(self.chunks), 1)

    @classmethod
    def decode(cls, data: bytes) -> ChunkTable:
        """The table that `encode` wrote; raises `DatasetDamaged`."""
        unpacked = zlib.decompressobj()
        try:
            plain = unpacked.decompress(data, MAX_TABLE_BYTES)
            if unpacked.unconsumed_tail or not unpacked.eof:
                raise DatasetDamaged(f"the list of chunks is cut short, or has more than {MAX_TABLE_BYTES} bytes")
            return cls(msgspec.msgpack.decode(plain, type=list[DatasetChunk]))
        except (msgspec.MsgspecError, zlib.error, RecursionError, BadDataset) as error:
            raise DatasetDamaged(f"the list of chunks cannot be read: {error}") from error


def digest_of(files: Sequence[FileSummary]) -> bytes:
    """The digest of a data set: two nodes with the same one have the same chunks in the same order."""
    return hashlib.sha256(msgspec.msgpack.encode(list(files))).digest()


def difference(registered: Sequence[FileSummary], reported: Sequence[FileSummary]) -> str:
    """The first difference between two data sets, in words; empty where there is none."""
    for number, (ours, theirs) in enumerate(zip(registered, reported, strict=False)):
        if ours.path != theirs.path:
            return f"file {number} is {theirs.path}, the registered one is {ours.path}"
        if ours.chunks != theirs.chunks:
            return f"{ours.path} has {theirs.chunks} chunks, the registered one has {ours.chunks}"
        if ours.records != theirs.records:
            return f"{ours.path} has {theirs.records} records, the registered one has {ours.records}"
        if ours.digest != theirs.digest:
            return f"{ours.path} has its chunks at other places than the registered one"
    if len(registered) != len(reported):
        longer, whose = (reported, "reported") if len(reported) > len(registered) else (registered, "registered")
        first = longer[min(len(registered), len(reported))].path
        return f"{len(reported)} files, the registered one has {len(registered)}: {first} is only in the {whose} one"
    return ""


# -- the files of this machine


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
