"""Collects records into chunks and writes each chunk as soon as it is full.

A chunk is cut where the Go implementation cuts it, so that without a compressor both write the same bytes. Memory is
bounded by one chunk. A new file appears whole or not at all: a draft beside the place gets its name when it is synced.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from p2pnode.training.dispatch.recordio.chunk import (
    LENGTH,
    LENGTH_BYTES,
    MAX_U32,
    ChunkHeader,
    Compressor,
    compress,
)

#: Where the Go implementation cuts chunks, by the bytes of their records.
CHUNK_BYTES = 32 * 2**20
#: The largest setting: half of what readers accept by default.
MAX_CHUNK_SETTING_BYTES = 2**27
#: The lengths of records count for nothing in the reference: a file of empty records would be one endless chunk. Here a
#: chunk ends at eight times its bytes with the lengths, and before readers refuse it. Records of one byte on average
#: are cut as there.
_MOST_WITH_LENGTHS = 8
_MOST_PAYLOAD_BYTES = 2**28

#: Of a new file: everybody may read it.
_MODE = 0o644

_packed_length = LENGTH.pack


class Sink(Protocol):
    """Where chunks go: `overlay.environment.NewFile`, or a file opened in binary mode."""

    def write(self, data: bytes, /) -> Any: ...


class RecordWriter:
    """Collects records and writes whole chunks to `sink`.

    A chunk is cut before a record that would bring it over `chunk_bytes` (the lengths do not count), and after
    `records_per_chunk` records if that is given. A record larger than `chunk_bytes` is a chunk by itself.
    Raises `ValueError` for limits that cannot be.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        compressor: Compressor = Compressor.SNAPPY,
        chunk_bytes: int = CHUNK_BYTES,
        records_per_chunk: int | None = None,
    ) -> None:
        if not 1 <= chunk_bytes <= MAX_CHUNK_SETTING_BYTES:
            raise ValueError(f"chunk_bytes is {chunk_bytes}; it must be from 1 to {MAX_CHUNK_SETTING_BYTES}")
        if records_per_chunk is not None and records_per_chunk < 1:
            raise ValueError(f"records_per_chunk is {records_per_chunk}; it must be at least 1")
        self._sink = sink
        self._compressor = compressor
        self._chunk_bytes = chunk_bytes
        self._most_payload_bytes = min(_MOST_WITH_LENGTHS * chunk_bytes, _MOST_PAYLOAD_BYTES)
        #: How many bytes of records the chunk still takes; their lengths do not count.
        self._room_bytes = chunk_bytes
        self._records_per_chunk = MAX_U32 if records_per_chunk is None else records_per_chunk
        self._payload = bytearray()
        self._in_chunk = 0
        #: Records, whole chunks and bytes written so far; the records include those not yet in a chunk.
        self.records = self.chunks = self.written_bytes = 0

    def write(self, record: bytes | bytearray) -> None:
        """Add one record. Raises `ValueError` if it has more than 2³² − 1 bytes, and what the sink raises."""
        size = len(record)
        if size > MAX_U32 - LENGTH_BYTES:
            raise ValueError(f"a record of {size} bytes is too large: the format has 32 bits for a chunk with one")
        payload = self._payload
        # Called for every record: the limits of bytes are two comparisons.
        if size > self._room_bytes or len(payload) + LENGTH_BYTES + size > self._most_payload_bytes:
            self.flush()
            payload = self._payload
        payload += _packed_length(size)
        payload += record
        self._room_bytes -= size
        self._in_chunk += 1
        self.records += 1
        if self._in_chunk >= self._records_per_chunk:
            self.flush()

    def write_all(self, records: Iterable[bytes]) -> None:
        """Add these records, one after the other."""
        write = self.write
        for record in records:
            write(record)

    def flush(self) -> None:
        """End the current chunk, if it has a record, and write it."""
        if not self._in_chunk:
            return
        payload = compress(bytes(self._payload), self._compressor)
        count, self._payload, self._in_chunk = self._in_chunk, bytearray(), 0
        self._room_bytes = self._chunk_bytes
        if len(payload) > MAX_U32:
            raise ValueError(f"a chunk of {len(payload)} bytes is too large: the format has 32 bits for its length")
        header = ChunkHeader(zlib.crc32(payload), self._compressor, len(payload), count).encode()
        self._sink.write(header)
        self._sink.write(payload)
        self.chunks += 1
        self.written_bytes += len(header) + len(payload)


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
        with os.fdopen(handle, "wb") as file:
            writer = RecordWriter(
                file, compressor=compressor, chunk_bytes=chunk_bytes, records_per_chunk=records_per_chunk
            )
            yield writer
            writer.flush()
            file.flush()
            os.fsync(file.fileno())
        draft.chmod(_MODE)
        draft.replace(target)
        _sync_folder(target.parent)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Make renames in a folder durable, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
