"""RecordIO files that are written whole or not at all, and files that chunks are appended to.

New files are drafts beside their place, and get their names when all of them are whole and synced. Appending keeps what
is there: if it fails, the file is cut back to its former length; if the process dies, the last chunk at most is torn.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Literal

from training.dispatch.recordio.errors import RecordFileError, TornChunk
from training.dispatch.recordio.index import read_index
from training.dispatch.recordio.layout import Compressor
from training.dispatch.recordio.writer import CHUNK_BYTES, RecordWriter

#: What to do about a torn last chunk of a file to append to: raise `TornChunk`, or cut it off.
TornAppend = Literal["refuse", "truncate"]

_MODE = 0o644
_FIVE_DIGITS = "[0-9]" * 5


@contextlib.contextmanager
def create_records(
    path: str | os.PathLike[str],
    *,
    compressor: Compressor = Compressor.SNAPPY,
    chunk_bytes: int = CHUNK_BYTES,
    records_per_chunk: int | None = None,
    overwrite: bool = False,
) -> Iterator[RecordWriter]:
    """A writer of a new file, which appears whole and synced when the block ends, and not at all if it raises.

    Raises `FileExistsError` unless `overwrite`, and `OSError` if it cannot be written.
    """
    with create_series(
        path,
        compressor=compressor,
        chunk_bytes=chunk_bytes,
        records_per_chunk=records_per_chunk,
        overwrite=overwrite,
    ) as series:
        yield series.writer


@contextlib.contextmanager
def create_series(
    path: str | os.PathLike[str],
    *,
    compressor: Compressor = Compressor.SNAPPY,
    chunk_bytes: int = CHUNK_BYTES,
    records_per_chunk: int | None = None,
    records_per_file: int | None = None,
    file_bytes: int | None = None,
    overwrite: bool = False,
) -> Iterator[RecordSeries]:
    """A writer of one file or of several: with `records_per_file` or `file_bytes`, `train.recordio` becomes
    `train-00000.recordio` and so on. All appear when the block ends, or none if it raises.

    A file ends after that many records, or with the chunk that brings it to that many bytes. Raises `FileExistsError`
    if there is such a file. With `overwrite` the files of a former series are replaced, or removed where the new one is
    shorter. Raises `OSError` if a file cannot be written.
    """
    make = partial(RecordWriter, compressor=compressor, chunk_bytes=chunk_bytes, records_per_chunk=records_per_chunk)
    series = RecordSeries(Path(path), make, records_per_file, file_bytes, overwrite)
    try:
        series.begin()
        yield series
        series.commit()
    finally:
        series.discard()


class RecordSeries:
    """Writes records to one file, or to numbered files of limited size (`create_series`). `paths` are their names."""

    def __init__(
        self,
        path: Path,
        make_writer: partial[RecordWriter],
        records_per_file: int | None,
        file_bytes: int | None,
        overwrite: bool,
    ) -> None:
        for name, limit in (("records_per_file", records_per_file), ("file_bytes", file_bytes)):
            if limit is not None and limit < 1:
                raise ValueError(f"{name} is {limit}; it must be at least 1")
        self._path, self._make_writer = path, make_writer
        self._records_per_file, self._file_bytes = records_per_file, file_bytes
        self._overwrite = overwrite
        self._numbered = records_per_file is not None or file_bytes is not None
        self._drafts: list[Path] = []
        self._file: IO[bytes] | None = None
        self.paths: list[Path] = []
        #: Records, chunks and bytes of the files that are finished.
        self.records = self.chunks = self.written_bytes = 0
        self._existing: list[Path] = []

    def begin(self) -> None:
        """Look for files in the way, and make the first draft. Raises `FileExistsError`, `ValueError` for limits of
        chunks that cannot be, and `OSError`."""
        self._refuse_existing()
        self.writer = self._next_file()

    def write(self, record: bytes) -> None:
        """Add one record, to the next file if this one is full."""
        if self._is_full():
            self._end_file()
            self.writer = self._next_file()
        self.writer.write(record)

    def commit(self) -> None:
        """End the last file and give all of them their names."""
        self._end_file()
        for draft, path in zip(self._drafts, self.paths, strict=True):
            draft.replace(path)
        for path in set(self._existing).difference(self.paths):
            path.unlink()
        _sync_folder(self._path.parent)

    def discard(self) -> None:
        """Close and remove what has no name yet; does nothing after `commit`. Raises nothing."""
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
        for draft in self._drafts:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)

    def _refuse_existing(self) -> None:
        existing = [self._path] if self._path.exists() else []
        if self._numbered:
            existing = sorted(self._path.parent.glob(f"{_escaped(self._path.stem)}-{_FIVE_DIGITS}{self._path.suffix}"))
        if existing and not self._overwrite:
            raise FileExistsError(f"{existing[0]} exists already")
        self._existing = existing

    def _is_full(self) -> bool:
        return (self._records_per_file is not None and self.writer.records >= self._records_per_file) or (
            self._file_bytes is not None and self.writer.written_bytes >= self._file_bytes
        )

    def _next_file(self) -> RecordWriter:
        name = self._path.name
        if self._numbered:
            name = f"{self._path.stem}-{len(self.paths):05d}{self._path.suffix}"
        handle, draft = tempfile.mkstemp(dir=self._path.parent, prefix=f".{name}.", suffix=".tmp")
        self._drafts.append(Path(draft))
        self.paths.append(self._path.with_name(name))
        self._file = os.fdopen(handle, "wb", buffering=0)
        return self._make_writer(_Whole(self._file))

    def _end_file(self) -> None:
        assert self._file is not None
        self.writer.flush()
        self.records += self.writer.records
        self.chunks += self.writer.chunks
        self.written_bytes += self.writer.written_bytes
        os.fsync(self._file.fileno())
        self._file.close()
        self._drafts[-1].chmod(_MODE)


@contextlib.contextmanager
def append_records(
    path: str | os.PathLike[str],
    *,
    compressor: Compressor = Compressor.SNAPPY,
    chunk_bytes: int = CHUNK_BYTES,
    records_per_chunk: int | None = None,
    torn: TornAppend = "refuse",
) -> Iterator[RecordWriter]:
    """A writer that adds chunks to a file, which is made if it is missing. The file is synced when the block ends, and
    has its former length again if it raises.

    What is there is checked by its headers first. Raises `TornChunk` for a torn last chunk, unless `torn` is
    "truncate": then it is cut off for good. Raises `CorruptChunk` for other contents, `RecordFileError` if another
    process is writing the file, and `OSError`.
    """
    import fcntl  # not everywhere; reading needs no lock

    name = os.fspath(path)
    made = not Path(name).exists()
    with Path(name).open("ab", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RecordFileError(name, "another process is writing this file: wait until it has ended") from None
        found = read_index(name, torn="skip")
        if found.torn is not None and torn == "refuse":
            problem = f'{found.torn.problem}; to append all the same, cut this chunk off (torn="truncate")'
            raise TornChunk(name, problem, chunk=found.torn.chunk, offset=found.torn.offset)
        writer = RecordWriter(
            _Whole(file), compressor=compressor, chunk_bytes=chunk_bytes, records_per_chunk=records_per_chunk
        )
        file.truncate(found.whole_bytes)
        try:
            yield writer
            writer.flush()
            os.fsync(file.fileno())
        except BaseException:
            with contextlib.suppress(OSError):
                file.truncate(found.whole_bytes)
                if made:
                    Path(name).unlink()
            raise


class _Whole:
    """A file without a buffer that writes pieces whole: one call of the system may write less."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]


def _escaped(stem: str) -> str:
    """The stem for a glob, each of its special characters meant literally."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in stem)


def _sync_folder(folder: Path) -> None:
    """Make renames in a folder durable, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
