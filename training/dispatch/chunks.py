"""The chunks of a data set, as columns: twenty bytes each, and a digest by which two nodes compare what they have.

A data set never changes, so it is stored once and apart from the state of the queue. Its chunks are in the order of the
files as they were named, and of the chunks inside each. Pure.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from training.errors import TrainingError

#: Refused above: the columns of a data set are kept in memory, 670 MB for so many.
MAX_CHUNKS = 1 << 25
MAX_PATH_BYTES = 4096

#: How a column is stored, by its type code in memory.
_LITTLE = {"I": "<u4", "Q": "<u8"}


class BadDataset(TrainingError):
    """A list of chunks that no queue can be made of; the text says which entry and why."""


class DatasetDiffers(TrainingError):
    """Another data set than the registered one; the text names the first difference."""


class DatasetDamaged(TrainingError):
    """The stored list of chunks cannot be read back."""


@dataclass(frozen=True, slots=True)
class DatasetChunk:
    """One chunk of a RecordIO file: `index` counts the chunks of the file from 0, `offset` is that of its header."""

    path: str
    index: int
    offset: int
    records: int


class FileSummary(msgspec.Struct, frozen=True, array_like=True):
    """What is compared of one file: its path, its chunks and records, and a digest of their places."""

    path: str
    chunks: int
    records: int
    digest: bytes


class _Stored(msgspec.Struct, array_like=True):
    version: int
    paths: list[str]
    files: bytes
    indices: bytes
    offsets: bytes
    records: bytes


class ChunkTable:
    """The chunks of a data set. Build it off the event loop: ten million chunks take seconds.

    Raises `BadDataset` for no chunks, too many, numbers that do not fit their columns, or a path that comes back.
    """

    def __init__(self, chunks: Iterable[DatasetChunk]) -> None:
        self.paths: list[str] = []
        self.files, self.indices = array("I"), array("I")
        self.offsets, self.records = array("Q"), array("I")
        known: set[str] = set()
        for chunk in chunks:
            path = chunk.path
            if not self.paths or path != self.paths[-1]:
                if path in known:
                    raise BadDataset(f"the chunks of {path} are not next to each other: is the file named twice?")
                if not path or len(path.encode()) > MAX_PATH_BYTES:
                    raise BadDataset(f"a path must have 1 to {MAX_PATH_BYTES} bytes: {path[:80]!r}")
                known.add(path)
                self.paths.append(path)
            if len(self.files) == MAX_CHUNKS:
                raise BadDataset(f"more than {MAX_CHUNKS} chunks: write larger chunks, or use several runs")
            try:
                self.files.append(len(self.paths) - 1)
                self.indices.append(chunk.index)
                self.offsets.append(chunk.offset)
                self.records.append(chunk.records)
            except (OverflowError, TypeError) as error:
                raise BadDataset(f"{chunk}: {error}") from error
        if not self.files:
            raise BadDataset("the data set has no chunk: there is nothing to train on")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> DatasetChunk:
        """The chunk with this number in the data set."""
        return DatasetChunk(
            self.paths[self.files[number]], self.indices[number], self.offsets[number], self.records[number]
        )

    def of_task(self, task: int, chunks_per_task: int) -> list[DatasetChunk]:
        """The chunks of a task: a run of the data set, which may span files."""
        start = task * chunks_per_task
        return [self[number] for number in range(start, min(start + chunks_per_task, len(self)))]

    def tasks(self, chunks_per_task: int) -> int:
        """How many tasks there are; the last one may be smaller."""
        return -(-len(self) // chunks_per_task)

    def summary(self) -> list[FileSummary]:
        """One entry per file, in order. Seconds for ten million chunks."""
        files = _numbers(self.files)
        found = []
        start = 0
        for number, path in enumerate(self.paths):
            end = int(np.searchsorted(files, number, side="right"))
            digest = hashlib.sha256()
            for column in (self.indices, self.offsets, self.records):
                digest.update(_packed(column[start:end]))
            found.append(
                FileSummary(
                    path, end - start, int(_numbers(self.records)[start:end].sum(dtype=np.uint64)), digest.digest()[:16]
                )
            )
            start = end
        return found

    def encode(self) -> bytes:
        """The table for a store, compressed."""
        columns = [
            zlib.compress(_steps(column), 1) for column in (self.files, self.indices, self.offsets, self.records)
        ]
        return msgspec.msgpack.encode(_Stored(1, self.paths, *columns))

    @classmethod
    def decode(cls, data: bytes) -> ChunkTable:
        """The table that `encode` wrote; raises `DatasetDamaged`."""
        try:
            stored = msgspec.msgpack.decode(data, type=_Stored)
            if stored.version != 1:
                raise DatasetDamaged(f"the stored list of chunks has version {stored.version}, this program reads 1")
            table = cls.__new__(cls)
            table.paths = stored.paths
            table.files, table.indices = _sums("I", stored.files), _sums("I", stored.indices)
            table.offsets, table.records = _sums("Q", stored.offsets), _sums("I", stored.records)
        except (msgspec.MsgspecError, zlib.error, ValueError) as error:
            raise DatasetDamaged(f"the stored list of chunks cannot be read: {error}") from error
        table.check()
        return table

    def check(self) -> None:
        """Raise `DatasetDamaged` unless the columns are of one length, and each file is named once, in one run."""
        lengths = {len(self.files), len(self.indices), len(self.offsets), len(self.records)}
        files = _numbers(self.files)
        runs = files[np.flatnonzero(np.diff(files, prepend=np.uint32(2**32 - 1)))]
        if len(lengths) != 1 or not np.array_equal(runs, np.arange(len(self.paths), dtype=np.uint32)):
            raise DatasetDamaged("the stored list of chunks contradicts itself")
        if len(set(self.paths)) != len(self.paths) or not self.paths:
            raise DatasetDamaged("the stored list of chunks names no file, or one twice")
        if not all(0 < len(path.encode()) <= MAX_PATH_BYTES for path in self.paths):
            raise DatasetDamaged(f"a stored path does not have 1 to {MAX_PATH_BYTES} bytes")


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


def _packed(column: array[int]) -> bytes:
    """Little-endian bytes, on every machine."""
    return _numbers(column).astype(_LITTLE[column.typecode], copy=False).tobytes()


def _steps(column: array[int]) -> bytes:
    """Differences of neighbours, modulo the width of the column: they compress ten times as well."""
    return np.diff(_numbers(column), prepend=np.zeros(1, column.typecode)).astype(_LITTLE[column.typecode]).tobytes()


def _sums(typecode: str, data: bytes) -> array[int]:
    """The column of which `_steps` gave the differences."""
    # It may come from another node: a few bytes must not become gigabytes.
    unpacked = zlib.decompressobj()
    plain = unpacked.decompress(data, MAX_CHUNKS * array(typecode).itemsize)
    if unpacked.unconsumed_tail or not unpacked.eof:
        raise DatasetDamaged(f"the stored list of chunks is cut short, or has more than {MAX_CHUNKS} chunks")
    steps = np.frombuffer(plain, _LITTLE[typecode])
    column = array(typecode)
    column.frombytes(np.cumsum(steps, dtype=np.dtype(typecode)).tobytes())
    return column


def _numbers(column: array[int]) -> npt.NDArray[Any]:
    return np.frombuffer(column, np.dtype(column.typecode))
