"""One chunk: a header and payload to records, and records to a header and payload. Pure.

`decode` returns exactly the records that were written, or raises. The checksum covers the payload. A damaged header
contradicts it: a size or checksum its bytes, a count the lengths of its records, and a compressor its form. One case
may pass by chance and is tested for: a compressed payload read as "none".
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np

from p2pnode.training import kernels
from p2pnode.training.dispatch.recordio.compression import (
    GZIP_MAGIC,
    SNAPPY_IDENTIFIER,
    OutputTooLarge,
    decompress,
)
from p2pnode.training.dispatch.recordio.layout import (
    LENGTH,
    LENGTH_BYTES,
    ChunkHeader,
    Compressor,
    MalformedChunk,
)

#: Where each record of a payload ends: int64, or a range if all records have the same length.
Ends = np.ndarray[Any, np.dtype[np.int64]] | range

_COUNT = np.dtype("<u4")
#: Iteration copies so many records at a time: enough to make the work in NumPy worth it.
_BLOCK_RECORDS = 1024


class Chunk(Sequence[bytes]):
    """The records of one chunk, in the order of the file. Each access copies records out of the chunk's payload.

    `payload` is the uncompressed payload, lengths included, for those who want no copies. `ends` has the offset in it
    at which each record ends; a range if all records have the same length.
    """

    def __init__(self, payload: bytes, ends: Ends) -> None:
        self.payload = payload
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            wanted = range(*index.indices(len(self)))
            return self._between(wanted.start, wanted.stop) if wanted.step == 1 else [self[each] for each in wanted]
        each = range(len(self))[index]  # negative indices, IndexError
        return self._between(each, each + 1)[0]

    def __iter__(self) -> Iterator[bytes]:
        for first in range(0, len(self), _BLOCK_RECORDS):
            yield from self._between(first, min(first + _BLOCK_RECORDS, len(self)))

    def records(self) -> list[bytes]:
        """All records at once: about the memory of the chunk once more."""
        return self._between(0, len(self))

    def matrix(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Records of one length as an array of uint8, shape [records, length]: read-only, without a copy. Raises
        `ValueError` if the lengths differ."""
        if not isinstance(self._ends, range):
            raise ValueError("the records of this chunk have different lengths, so they are no matrix")
        return np.frombuffer(self.payload, np.uint8).reshape(len(self), self._ends.step)[:, LENGTH_BYTES:]

    def _between(self, first: int, last: int) -> list[bytes]:
        """The records from `first` on and before `last`, without a loop in Python where all have one length."""
        if first >= last:
            return []
        payload, ends = self.payload, self._ends
        if isinstance(ends, range):
            row = np.dtype(
                {
                    "names": ["_"],
                    "formats": [f"V{ends.step - LENGTH_BYTES}"],
                    "offsets": [LENGTH_BYTES],
                    "itemsize": ends.step,
                }
            )
            found: list[bytes] = np.frombuffer(payload, row, last - first, first * ends.step)["_"].tolist()
            return found
        before = int(ends[first - 1]) if first else 0
        stops = ends[first:last]
        starts = np.concatenate(([before], stops[:-1])) + LENGTH_BYTES
        return [payload[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]


def decode(header: ChunkHeader, payload: bytes, max_bytes: int) -> Chunk:
    """The records of a chunk. Raises `MalformedChunk`, and `OutputTooLarge` if they have more than `max_bytes`."""
    if len(payload) != header.payload_bytes:
        raise MalformedChunk(f"the payload has {len(payload)} bytes, and its header says {header.payload_bytes}")
    found = zlib.crc32(payload)
    if found != header.checksum:
        raise MalformedChunk(
            f"the checksum of the payload is {found:#010x}, and its header says {header.checksum:#010x}"
        )
    raw = decompress(payload, header.compressor, max_bytes)
    ends = record_ends(raw, header.records)
    if header.compressor is Compressor.NONE:
        _refuse_compressed(header, raw, max_bytes)
    return Chunk(raw, ends)


def record_ends(payload: bytes, count: int) -> Ends:
    """Where each of `count` records ends in an uncompressed payload. Raises `MalformedChunk` unless the payload is
    exactly these records."""
    equal = _equal_rows(payload, count)
    if equal is not None:
        return equal
    size = len(payload)
    if count * LENGTH_BYTES > size:
        raise MalformedChunk(f"the header says {count} records, and the payload has {size} bytes")
    ends = _scanned(payload, count) if kernels.COMPILED is None else kernels.COMPILED.record_ends(payload, count)
    at = int(ends[-1])
    if at > size:
        raise MalformedChunk(f"record {len(ends) - 1} of the chunk ends {at - size} bytes after the payload does")
    if len(ends) < count:
        raise MalformedChunk(f"the header says {count} records, and the payload has room for {len(ends)}")
    if at < size:
        raise MalformedChunk(f"the header says {count} records, and {size - at} bytes follow the last of them")
    return ends


def _scanned(payload: bytes, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """What the compiled `record_ends` computes."""
    size, at = len(payload), 0
    ends = array("q")  # a list of integers would take ten times a chunk of tiny records
    length_at = LENGTH.unpack_from
    while at + LENGTH_BYTES <= size and len(ends) < count:
        at += LENGTH_BYTES + length_at(payload, at)[0]
        ends.append(at)
    return np.frombuffer(ends, np.int64)


def _equal_rows(payload: bytes, count: int) -> range | None:
    """The ends of records that all have the length of the first one; None if they do not. One pass of NumPy."""
    row_bytes, rest = divmod(len(payload), count)
    if rest or row_bytes < LENGTH_BYTES:
        return None
    rows = np.frombuffer(payload, np.uint8).reshape(count, row_bytes)
    lengths = np.ascontiguousarray(rows[:, :LENGTH_BYTES]).view(_COUNT)
    if (lengths != row_bytes - LENGTH_BYTES).any():
        return None
    return range(row_bytes, len(payload) + 1, row_bytes)


def _refuse_compressed(header: ChunkHeader, payload: bytes, max_bytes: int) -> None:
    """A flipped bit makes snappy or gzip "none". Such a payload passes the checksum, and may pass as records by chance.
    What begins like a compressed payload is therefore refused if it is one, with that number of records."""
    if payload.startswith(SNAPPY_IDENTIFIER):
        other = Compressor.SNAPPY
    elif payload.startswith(GZIP_MAGIC):
        other = Compressor.GZIP
    else:
        return
    try:
        record_ends(decompress(payload, other, max_bytes), header.records)
    except (MalformedChunk, OutputTooLarge):
        return
    raise MalformedChunk(f"the header says that the payload is not compressed, and it is {other.name.lower()}")
