"""One chunk of a RecordIO file (layout A): its header, compression and records, to bytes and back. Pure.

A file is a sequence of chunks and nothing else: no file header, footer or index. All integers are u32, little-endian.

    chunk   = magic 0x01020304 | checksum | compressor | payload bytes | records | payload
    payload = the records, compressed as a whole; checksum = its CRC-32 (zlib's) as it is in the file
    record  = length | bytes

`decode` returns exactly the records that were written, or raises. The checksum covers the payload. A damaged header
contradicts it: a size or checksum its bytes, a count the lengths of its records, and a compressor its form. One case
may pass by chance and is tested for: a compressed payload read as "none".

Snappy is the framing format: an identifier of the stream, then frames of at most 64 KiB, each with a masked CRC-32C.
The sizes in the frames are added up before anything is decompressed: the output is allocated once, and a chunk that
announces too much costs nothing. Gzip announces no size: it is decompressed up to the limit.
Source: PaddlePaddle/recordio; google/snappy, `framing_format.txt`; RFC 1952.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, overload

import numpy as np

from p2pnode.training import kernels

MAGIC = 0x01020304
MAGIC_BYTES = MAGIC.to_bytes(4, "little")
HEADER = struct.Struct("<5I")
HEADER_BYTES = HEADER.size
#: Each record begins with its length.
LENGTH = struct.Struct("<I")
LENGTH_BYTES = LENGTH.size
#: What a u32 can hold: the most bytes of a record, and of a chunk's payload.
MAX_U32 = 0xFFFF_FFFF

#: The first frame of each stream.
SNAPPY_IDENTIFIER = b"\xff\x06\x00\x00sNaPpY"
GZIP_MAGIC = b"\x1f\x8b\x08"

_COMPRESSED, _UNCOMPRESSED, _IDENTIFIER, _FIRST_SKIPPABLE = 0x00, 0x01, 0xFF, 0x80
_FRAME_HEAD_BYTES = 4
_FRAME_CRC_BYTES = 4
#: The most bytes a frame may become.
_FRAME_BYTES = 65_536
#: zlib's level 6: what Go's writer takes.
_GZIP_LEVEL = 6
#: zlib: a window of 32 KiB, and the header and trailer of gzip.
_GZIP_WINDOW = 31

#: Where each record of a payload ends.
Ends = np.ndarray[Any, np.dtype[np.int64]]

#: Iteration copies so many records at a time: enough to make the work in NumPy worth it.
_BLOCK_RECORDS = 1024


class MalformedChunk(ValueError):
    """These bytes are not a chunk; the text says what they contradict. The reader adds the file and the place."""


class OutputTooLarge(Exception):
    """The payload would become more bytes than allowed."""


class Compressor(IntEnum):
    """How the payload of a chunk is compressed: the code in its header."""

    NONE = 0
    #: Snappy's framing format, with a CRC-32C for each frame.
    SNAPPY = 1
    GZIP = 2


#: How many bytes a payload byte can become at most. Snappy: a copy of 3 bytes gives 64. Deflate: 258 bytes from 2 bits.
_MOST_EXPANSION = {Compressor.NONE: 1, Compressor.SNAPPY: 22, Compressor.GZIP: 1032}


class ChunkHeader(NamedTuple):
    """The header of one chunk. `payload_bytes` is the length of the payload in the file; `records` is at least 1."""

    checksum: int
    compressor: Compressor
    payload_bytes: int
    records: int

    def encode(self) -> bytes:
        """The 20 bytes in the file."""
        return HEADER.pack(MAGIC, self.checksum, self.compressor, self.payload_bytes, self.records)


def parse_header(data: bytes) -> ChunkHeader:
    """The header in these 20 bytes. Raises `MalformedChunk`."""
    magic, checksum, code, payload_bytes, records = HEADER.unpack(data)
    if magic != MAGIC:
        raise MalformedChunk(f"no chunk begins here: the magic number is {magic:#010x} instead of {MAGIC:#010x}")
    try:
        compressor = Compressor(code)
    except ValueError:
        raise MalformedChunk(f"compressor {code} is unknown: 0 is none, 1 is snappy, 2 is gzip") from None
    if records == 0:
        raise MalformedChunk("the header announces no record, and no writer makes such a chunk")
    if records * LENGTH_BYTES > payload_bytes * _MOST_EXPANSION[compressor]:
        raise MalformedChunk(f"the header announces {records} records in {payload_bytes} bytes, which cannot hold them")
    return ChunkHeader(checksum, compressor, payload_bytes, records)


# -- compression


def compress(payload: bytes, compressor: Compressor) -> bytes:
    """The payload as it is in the file."""
    if compressor is Compressor.SNAPPY:
        import cramjam  # 2 MB of code that nobody else needs

        return bytes(cramjam.snappy.compress(payload))
    if compressor is Compressor.GZIP:
        packer = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_WINDOW)
        return packer.compress(payload) + packer.flush()
    return payload


def decompress(payload: bytes, compressor: Compressor, max_bytes: int) -> bytes:
    """The records of a payload. Raises `MalformedChunk` if it is not of this compressor, and `OutputTooLarge` if it
    would become more than `max_bytes`."""
    if compressor is Compressor.SNAPPY:
        return _unsnap(payload, max_bytes)
    if compressor is Compressor.GZIP:
        return _gunzip(payload, max_bytes)
    if len(payload) > max_bytes:
        raise OutputTooLarge
    return payload


def _unsnap(payload: bytes, max_bytes: int) -> bytes:
    import cramjam

    size = snappy_bytes(payload)
    if size > max_bytes:
        raise OutputTooLarge
    output = bytearray(size)
    try:
        written = cramjam.snappy.decompress_into(payload, output)
    except cramjam.DecompressionError as error:
        raise MalformedChunk(f"the payload is not what its snappy frames announce: {error}") from None
    if written != size:
        raise MalformedChunk(f"the payload decompresses to {written} bytes, and its snappy frames announce {size}")
    return bytes(output)


def snappy_bytes(payload: bytes) -> int:
    """How many bytes the frames of a snappy stream announce in all. Raises `MalformedChunk`."""
    if not payload.startswith(SNAPPY_IDENTIFIER):
        raise MalformedChunk("the payload is not a snappy stream: it does not begin with the identifier of the format")
    total, at, end = 0, 0, len(payload)
    while at < end:
        if at + _FRAME_HEAD_BYTES > end:
            raise MalformedChunk("the payload ends inside the head of a snappy frame")
        kind = payload[at]
        body = at + _FRAME_HEAD_BYTES
        at = body + (payload[at + 1] | payload[at + 2] << 8 | payload[at + 3] << 16)
        if at > end:
            raise MalformedChunk("the payload ends inside a snappy frame")
        if kind == _COMPRESSED:
            size = _varint(payload, body + _FRAME_CRC_BYTES, at)
        elif kind == _UNCOMPRESSED:
            size = at - body - _FRAME_CRC_BYTES
        elif kind < _FIRST_SKIPPABLE:
            raise MalformedChunk(f"a snappy frame is of type {kind:#04x}, which nobody may skip")
        else:
            if kind == _IDENTIFIER and payload[body:at] != SNAPPY_IDENTIFIER[_FRAME_HEAD_BYTES:]:
                raise MalformedChunk("an identifier inside the snappy stream is of another format")
            continue
        if not 0 <= size <= _FRAME_BYTES:
            raise MalformedChunk(f"a snappy frame announces {size} bytes, and the format allows {_FRAME_BYTES}")
        total += size
    return total


def _varint(payload: bytes, at: int, end: int) -> int:
    """The length at the beginning of a raw snappy block."""
    value = 0
    for shift in range(0, 35, 7):
        if at >= end:
            break
        value |= (payload[at] & 0x7F) << shift
        if payload[at] < 0x80:
            return value
        at += 1
    raise MalformedChunk("a snappy frame has no length")


def _gunzip(payload: bytes, max_bytes: int) -> bytes:
    """Several members one after the other are one stream, as for every gzip reader."""
    parts: list[bytes] = []
    room, rest = max_bytes, payload
    while rest:
        unpacker = zlib.decompressobj(_GZIP_WINDOW)
        try:
            # One byte more than allowed tells a stream that ends at the limit from one that goes on.
            part = unpacker.decompress(rest, room + 1)
        except zlib.error as error:
            raise MalformedChunk(f"the payload is not gzip: {error}") from None
        if len(part) > room:
            raise OutputTooLarge
        if not unpacker.eof:
            raise MalformedChunk("the payload ends inside its gzip stream")
        parts.append(part)
        room -= len(part)
        rest = unpacker.unused_data
    return parts[0] if len(parts) == 1 else b"".join(parts)


# -- records


class Chunk(Sequence[bytes]):
    """The records of one chunk, in the order of the file. Each access copies records out of the chunk's payload.

    `payload` is the uncompressed payload, lengths included, for those who want no copies. `ends` has the offset in it
    at which each record ends, of one record at least.
    """

    def __init__(self, payload: bytes, ends: Ends) -> None:
        self.payload = payload
        self._ends = ends
        #: Bytes of each record with its length; 0 if they differ.
        self._row_bytes = int(ends[0]) if (np.diff(ends) == ends[0]).all() else 0

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
        if not self._row_bytes:
            raise ValueError("the records of this chunk have different lengths, so they are no matrix")
        return np.frombuffer(self.payload, np.uint8).reshape(len(self), self._row_bytes)[:, LENGTH_BYTES:]

    def _between(self, first: int, last: int) -> list[bytes]:
        """The records from `first` on and before `last`, without a loop in Python where all have one length."""
        if first >= last:
            return []
        payload, ends, row_bytes = self.payload, self._ends, self._row_bytes
        if row_bytes:
            row = np.dtype(
                {
                    "names": ["_"],
                    "formats": [f"V{row_bytes - LENGTH_BYTES}"],
                    "offsets": [LENGTH_BYTES],
                    "itemsize": row_bytes,
                }
            )
            found: list[bytes] = np.frombuffer(payload, row, last - first, first * row_bytes)["_"].tolist()
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


def _scanned(payload: bytes, count: int) -> Ends:
    """What the compiled `record_ends` computes."""
    size, at = len(payload), 0
    ends = array("q")  # a list of integers would take ten times a chunk of tiny records
    length_at = LENGTH.unpack_from
    while at + LENGTH_BYTES <= size and len(ends) < count:
        at += LENGTH_BYTES + length_at(payload, at)[0]
        ends.append(at)
    return np.frombuffer(ends, np.int64)


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
