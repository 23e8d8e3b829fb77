"""Finds the chunks of a RecordIO file by their headers alone: payloads are skipped, not read.

A file that ends inside its last chunk is torn: its writer was interrupted, and the chunks before are whole. A damaged
size may point behind the end of the file too. It is no torn chunk: the bytes that are left, or those up to another
chunk, have the checksum of the header. A file cut exactly between two chunks is a valid, shorter file: the format has
nothing to tell it by.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from p2pnode.training.dispatch.recordio.layout import (
    HEADER_BYTES,
    MAGIC_BYTES,
    ChunkHeader,
    CorruptChunk,
    MalformedChunk,
    TornChunk,
    parse_header,
)

#: What to do about a torn last chunk: raise `TornChunk`, or leave it out and report it.
TornPolicy = Literal["refuse", "skip"]

_BLOCK_BYTES = 1 << 20


class ChunkPlace(NamedTuple):
    """One chunk of a file: its number from 0, the offset of its header in bytes, and its header."""

    number: int
    offset: int
    header: ChunkHeader

    @property
    def records(self) -> int:
        """How many records the chunk has."""
        return self.header.records

    @property
    def end(self) -> int:
        """The offset of the first byte after the chunk."""
        return self.offset + HEADER_BYTES + self.header.payload_bytes


class FileIndex(NamedTuple):
    """The chunks of a file in their order. `torn` is the error of a torn last chunk that was skipped, else None."""

    path: str
    file_bytes: int
    chunks: tuple[ChunkPlace, ...]
    torn: TornChunk | None

    @property
    def records(self) -> int:
        """How many records the whole chunks have together."""
        return sum(chunk.records for chunk in self.chunks)

    @property
    def whole_bytes(self) -> int:
        """The length of the file without a torn last chunk."""
        return self.chunks[-1].end if self.chunks else 0


def read_index(path: str | os.PathLike[str], *, torn: TornPolicy = "refuse") -> FileIndex:
    """The index of a file, from 20 bytes a chunk. An empty file has no chunk.

    Raises `CorruptChunk`, `TornChunk` with `torn="refuse"`, and `OSError` if the file cannot be read.
    """
    name = os.fspath(path)
    with Path(name).open("rb", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        chunks: list[ChunkPlace] = []
        try:
            chunks.extend(walk(file, name, size))
        except TornChunk as error:
            if torn == "refuse":
                raise
            # `extend` has taken what came before.
            return FileIndex(name, size, tuple(chunks), error)
    return FileIndex(name, size, tuple(chunks), None)


def walk(file: BinaryIO, path: str, size: int) -> Iterator[ChunkPlace]:
    """The chunks of an open file of `size` bytes, one header after the other; the caller may move the file in between.
    Raises `CorruptChunk` and `TornChunk` where the file goes wrong."""
    number = offset = 0
    while offset < size:
        place = place_at(file, path, size, offset, number)
        yield place
        number, offset = number + 1, place.end


def place_at(file: BinaryIO, path: str, size: int, offset: int, number: int | None) -> ChunkPlace:
    """The chunk whose header is at `offset`. Raises as `walk`; `number` is for errors, None if it is not known."""
    file.seek(offset)
    data = read_exactly(file, min(HEADER_BYTES, size - offset))
    if len(data) < HEADER_BYTES:
        if data[: len(MAGIC_BYTES)] != MAGIC_BYTES[: len(data)]:
            raise CorruptChunk(path, f"the last {len(data)} bytes are not a chunk", chunk=number, offset=offset)
        raise _torn(path, number, offset, f"the file ends after {len(data)} of the {HEADER_BYTES} bytes of its header")
    try:
        header = parse_header(data)
    except MalformedChunk as error:
        hint = " (or the size of the chunk before is damaged)" if offset else ""
        raise CorruptChunk(path, f"{error}{hint}", chunk=number, offset=offset) from None
    left = size - offset - HEADER_BYTES
    if header.payload_bytes > left:
        if _has_whole_payload(file, header.checksum, left):
            problem = f"its header says {header.payload_bytes} bytes, and its checksum fits fewer: the size is damaged"
            raise CorruptChunk(path, problem, chunk=number, offset=offset)
        raise _torn(path, number, offset, f"the file ends after {left} of its {header.payload_bytes} bytes")
    return ChunkPlace(-1 if number is None else number, offset, header)


def read_exactly(file: BinaryIO, count: int) -> bytes:
    """`count` bytes, or fewer at the end of the file: an unbuffered file may return less than it has."""
    data = file.read(count) or b""
    while len(data) < count:
        more = file.read(count - len(data))
        if not more:
            break
        data += more
    return data


def _torn(path: str, number: int | None, offset: int, problem: str) -> TornChunk:
    return TornChunk(path, f"{problem}: whoever wrote it was interrupted", chunk=number, offset=offset)


def _has_whole_payload(file: BinaryIO, checksum: int, left: int) -> bool:
    """Whether the payload is there though the header says more: the bytes up to the end of the file, or up to something
    like another chunk, have the checksum. A chunk that is really torn does so once in 4 billion times."""
    crc = 0
    kept = b""  # bytes that may be the beginning of a magic number
    while left > 0:
        data = file.read(min(_BLOCK_BYTES, left))
        if not data:
            break
        left -= len(data)
        block = kept + data
        start = 0
        while (found := block.find(MAGIC_BYTES, start)) >= 0:
            crc = zlib.crc32(block[start:found], crc)
            if crc == checksum:
                return True
            crc = zlib.crc32(block[found : found + 1], crc)
            start = found + 1
        end = max(start, len(block) - len(MAGIC_BYTES) + 1) if left else len(block)
        crc = zlib.crc32(block[start:end], crc)
        kept = block[end:]
    return crc == checksum
