"""New RecordIO files, written whole or not at all: a draft beside the place gets its name when it is synced."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from p2pnode.training.dispatch.recordio.layout import Compressor
from p2pnode.training.dispatch.recordio.writer import CHUNK_BYTES, RecordWriter

_MODE = 0o644


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

    Raises `FileExistsError` unless `overwrite`, `ValueError` for limits of chunks that cannot be, and `OSError` if it
    cannot be written.
    """
    target = Path(path)
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists already")
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    draft = Path(name)
    try:
        with os.fdopen(handle, "wb", buffering=0) as file:
            writer = RecordWriter(
                _Whole(file), compressor=compressor, chunk_bytes=chunk_bytes, records_per_chunk=records_per_chunk
            )
            yield writer
            writer.flush()
            os.fsync(file.fileno())
        draft.chmod(_MODE)
        draft.replace(target)
        _sync_folder(target.parent)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


class _Whole:
    """A file without a buffer that writes pieces whole: one call of the system may write less."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]


def _sync_folder(folder: Path) -> None:
    """Make renames in a folder durable, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
