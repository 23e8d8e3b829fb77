"""Reads the records of a RecordIO file, chunk by chunk, and finds its chunks by their headers alone.

Nothing is returned from a chunk before all of it was checked (`chunk.decode`). A chunk that is larger than
`max_chunk_bytes`, compressed or not, is refused before it is read or decompressed: memory is bounded by one chunk.

A file that ends inside its last chunk is torn: its writer was interrupted, and the chunks before are whole. A damaged
size may point behind the end of the file too. It is no torn chunk: the bytes that are left, or those up to another
chunk, have the checksum of the header. A file cut exactly between two chunks is a valid, shorter file: the format has
nothing to tell it by.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, NamedTuple, Self

from p2pnode.training.dispatch.recordio.chunk import (
    HEADER_BYTES,
    MAGIC_BYTES,
    Chunk,
    ChunkHeader,
    MalformedChunk,
    OutputTooLarge,
    decode,
    parse_header,
)
from p2pnode.training.errors import TrainingError

#: Eight times what writers put into a chunk; larger chunks have one larger record, or are meant to exhaust memory.
MAX_CHUNK_BYTES = 256 * 2**20
#: What to do about a torn last chunk: raise `TornChunk`, or leave it out and report it.
TornPolicy = Literal["refuse", "skip"]

_BLOCK_BYTES = 1 << 20


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


def read_index(path: str | os.PathLike[str], *, torn: TornPolicy = "refuse") -> FileIndex:
    """The index of a file, from 20 bytes a chunk. An empty file has no chunk.

    Raises `CorruptChunk`, `TornChunk` with `torn="refuse"`, and `OSError` if the file cannot be read.
    """
    name = os.fspath(path)
    with Path(name).open("rb") as file:
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


def place_at(file: BinaryIO, path: str, size: int, offset: int, number: int) -> ChunkPlace:
    """The chunk whose header is at `offset`. Raises as `walk`."""
    file.seek(offset)
    data = file.read(min(HEADER_BYTES, size - offset))
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
    return ChunkPlace(number, offset, header)


def _torn(path: str, number: int, offset: int, problem: str) -> TornChunk:
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


class RecordFile:
    """An open RecordIO file: iterate over its records, or read chunk i. A context manager; not for several threads.

    `torn` says what to do about a torn last chunk: raise `TornChunk` after the records before it, or skip it and
    set `torn_chunk`. Raises `OSError` if the file cannot be opened or read; every method that reads raises a
    `RecordFileError` for what is wrong with the file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        torn: TornPolicy = "refuse",
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
    ) -> None:
        self.path = os.fspath(path)
        self.torn_chunk: TornChunk | None = None
        self._torn: TornPolicy = torn
        self._max_chunk_bytes = max_chunk_bytes
        self._file = Path(self.path).open("rb")  # noqa: SIM115 - closed by `close`
        self._size = self._file.seek(0, os.SEEK_END)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @cached_property
    def index(self) -> FileIndex:
        """The chunks of the file, from their headers alone (`read_index`)."""
        found = read_index(self.path, torn=self._torn)
        self.torn_chunk = found.torn
        return found

    def __len__(self) -> int:
        """How many records the file has, by its headers."""
        return self.index.records

    def chunk(self, number: int) -> Chunk:
        """The records of chunk `number`, from 0. Raises `IndexError` if there is none."""
        if not 0 <= number < len(self.index.chunks):
            raise IndexError(f"{self.path} has {len(self.index.chunks)} chunks: there is no chunk {number}")
        return self._read(self.index.chunks[number])

    def chunk_at(self, offset: int, number: int, *, records: int | None = None) -> Chunk:
        """The records of chunk `number`, whose header is at `offset`; no other header is read.

        `records` is how many there must be: another number means that the file was changed since its index was made.
        """
        if not 0 <= offset < self._size:
            problem = f"the file has only {self._size} bytes: was it changed since its index was made?"
            raise CorruptChunk(self.path, problem, chunk=number, offset=offset)
        place = place_at(self._file, self.path, self._size, offset, number)
        if records is not None and place.records != records:
            problem = f"it has {place.records} records, not {records}: was the file changed since its index was made?"
            raise CorruptChunk(self.path, problem, chunk=number, offset=offset)
        return self._read(place)

    def chunks(self) -> Iterator[tuple[ChunkPlace, Chunk]]:
        """Each chunk with its place, read one after the other; needs no index."""
        try:
            for place in walk(self._file, self.path, self._size):
                yield place, self._read(place)
        except TornChunk as error:
            if self._torn == "refuse":
                raise
            self.torn_chunk = error

    def scan(self) -> Iterator[Chunk | RecordFileError]:
        """Every chunk or what is wrong with it, up to the first header that is damaged: nothing is found after that."""
        try:
            for place in walk(self._file, self.path, self._size):
                try:
                    yield self._read(place)
                except RecordFileError as error:
                    yield error
        except RecordFileError as error:
            yield error

    def __iter__(self) -> Iterator[bytes]:
        for _, chunk in self.chunks():
            yield from chunk

    def _read(self, place: ChunkPlace) -> Chunk:
        header = place.header
        if header.payload_bytes > self._max_chunk_bytes:
            raise self._too_large(f"{header.payload_bytes} bytes", place)
        self._file.seek(place.end - header.payload_bytes)
        payload = self._file.read(header.payload_bytes)
        try:
            return decode(header, payload, self._max_chunk_bytes)
        except MalformedChunk as error:
            raise CorruptChunk(self.path, str(error), chunk=place.number, offset=place.offset) from None
        except OutputTooLarge:
            raise self._too_large("more bytes once decompressed", place) from None

    def _too_large(self, what: str, place: ChunkPlace) -> ChunkTooLarge:
        problem = f"the chunk has {what}, and max_chunk_bytes allows {self._max_chunk_bytes}"
        return ChunkTooLarge(self.path, problem, chunk=place.number, offset=place.offset)


def read_chunk(
    path: str | os.PathLike[str],
    offset: int,
    number: int,
    *,
    records: int | None = None,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
) -> Chunk:
    """One chunk of a file (`RecordFile.chunk_at`); opens and closes the file, so any thread may call it."""
    with RecordFile(path, max_chunk_bytes=max_chunk_bytes) as file:
        return file.chunk_at(offset, number, records=records)
