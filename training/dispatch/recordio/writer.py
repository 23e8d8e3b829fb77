"""Collects records into chunks and writes each chunk as soon as it is full. Pure.

A chunk is cut where the Go implementation cuts it, so that without a compressor both write the same bytes. Memory is
bounded by one chunk. `files` has the files that this writes to.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any, Protocol

from p2pnode.training.dispatch.recordio.compression import compress
from p2pnode.training.dispatch.recordio.layout import LENGTH, LENGTH_BYTES, MAX_U32, ChunkHeader, Compressor

#: Where the Go implementation cuts chunks, by the bytes of their records.
CHUNK_BYTES = 32 * 2**20
#: The largest setting: half of what readers accept by default.
MAX_CHUNK_SETTING_BYTES = 2**27
#: The lengths of records count for nothing in the reference: a file of empty records would be one endless chunk. Here a
#: chunk ends at eight times its bytes with the lengths, and before readers refuse it. Records of one byte on average
#: are cut as there.
_MOST_WITH_LENGTHS = 8
_MOST_PAYLOAD_BYTES = 2**28

_packed_length = LENGTH.pack


class Sink(Protocol):
    """Where chunks go: `overlay.environment.NewFile`, or a file opened in binary mode that writes whole pieces."""

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
