"""The header of a chunk and the records inside it: layout A of RecordIO. Pure.

A file is a sequence of chunks and nothing else: no file header, footer or index. All integers are u32, little-endian.

    chunk   = magic 0x01020304 | checksum | compressor | payload bytes | records | payload
    payload = the records, compressed as a whole; checksum = its CRC-32 (zlib's) as it is in the file
    record  = length | bytes

The checksum does not cover the header, so a damaged header is found by what it contradicts: `parse_header` checks
what a header alone can contradict, `chunk.decode` the rest. Source: PaddlePaddle/recordio.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from p2pnode.training.errors import TrainingError

MAGIC = 0x01020304
MAGIC_BYTES = MAGIC.to_bytes(4, "little")
HEADER = struct.Struct("<5I")
HEADER_BYTES = HEADER.size
#: Each record begins with its length.
LENGTH = struct.Struct("<I")
LENGTH_BYTES = LENGTH.size
#: What a u32 can hold: the most bytes of a record, and of a chunk's payload.
MAX_U32 = 0xFFFF_FFFF


class MalformedChunk(ValueError):
    """These bytes are not a chunk; the text says what they contradict. The reader adds the file and the place."""


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


class RecordFileError(TrainingError):
    """A RecordIO file cannot be used as asked.

    `path` is the file, `chunk` the number of the chunk from 0 (None: not known, or no particular one), `offset` the
    byte of the file where that chunk's header begins, and `problem` the text without them.
    """

    def __init__(self, path: str, problem: str, *, chunk: int | None = None, offset: int | None = None) -> None:
        self.path, self.problem, self.chunk, self.offset = path, problem, chunk, offset
        where = [] if chunk is None else [f"chunk {chunk}"]
        where += [] if offset is None else [f"offset {offset}"]
        super().__init__(": ".join([path, *([", ".join(where)] if where else []), problem]))

    def __reduce__(self) -> tuple[object, ...]:
        """Errors cross processes: a data loader raises in its workers."""
        return _again, (type(self), self.path, self.problem, self.chunk, self.offset)


class CorruptChunk(RecordFileError):
    """A chunk contradicts its header or its checksum, or there is something else where a header must be."""


class TornChunk(RecordFileError):
    """The file ends inside its last chunk: its writer was interrupted. All chunks before it are whole."""


class ChunkTooLarge(RecordFileError):
    """A chunk is larger than the reader's limit, compressed or not. It was not read."""


def _again(
    kind: type[RecordFileError], path: str, problem: str, chunk: int | None, offset: int | None
) -> RecordFileError:
    return kind(path, problem, chunk=chunk, offset=offset)
