"""Reads the records of a RecordIO file, chunk by chunk; memory is bounded by one chunk.

Nothing is returned from a chunk before all of it was checked (`chunk.decode`). A chunk that is larger than
`max_chunk_bytes`, compressed or not, is refused before it is read or decompressed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

from p2pnode.training.dispatch.recordio.chunk import Chunk, decode
from p2pnode.training.dispatch.recordio.compression import OutputTooLarge
from p2pnode.training.dispatch.recordio.index import (
    ChunkPlace,
    FileIndex,
    TornPolicy,
    place_at,
    read_exactly,
    read_index,
    walk,
)
from p2pnode.training.dispatch.recordio.layout import (
    ChunkTooLarge,
    CorruptChunk,
    MalformedChunk,
    RecordFileError,
    TornChunk,
)

#: Eight times what writers put into a chunk; larger chunks have one larger record, or are meant to exhaust memory.
MAX_CHUNK_BYTES = 256 * 2**20


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
        self._file = Path(self.path).open("rb", buffering=0)  # noqa: SIM115 - closed by `close`
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

    def chunk_at(self, offset: int, *, records: int | None = None, number: int | None = None) -> Chunk:
        """The records of the chunk whose header is at `offset`; no other header is read.

        `records` is how many there must be: another number means that the file was changed since its index was made.
        `number` is the chunk's number, for errors.
        """
        if not 0 <= offset < self._size:
            problem = f"the file has only {self._size} bytes: was it changed since its index was made?"
            raise CorruptChunk(self.path, problem, chunk=number, offset=offset)
        place = place_at(self._file, self.path, self._size, offset, number)
        if records is not None and place.records != records:
            problem = f"it has {place.records} records, not {records}: was the file changed since its index was made?"
            raise CorruptChunk(self.path, problem, chunk=number, offset=offset)
        return self._read(place, number)

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

    def _read(self, place: ChunkPlace, number: int | None = None) -> Chunk:
        named = place.number if place.number >= 0 else number
        header = place.header
        if header.payload_bytes > self._max_chunk_bytes:
            raise self._too_large(f"{header.payload_bytes} bytes", named, place.offset)
        self._file.seek(place.offset + (place.end - place.offset - header.payload_bytes))
        payload = read_exactly(self._file, header.payload_bytes)
        try:
            return decode(header, payload, self._max_chunk_bytes)
        except MalformedChunk as error:
            raise CorruptChunk(self.path, str(error), chunk=named, offset=place.offset) from None
        except OutputTooLarge:
            raise self._too_large("more bytes once decompressed", named, place.offset) from None

    def _too_large(self, what: str, number: int | None, offset: int) -> ChunkTooLarge:
        problem = f"the chunk has {what}, and max_chunk_bytes allows {self._max_chunk_bytes}"
        return ChunkTooLarge(self.path, problem, chunk=number, offset=offset)


def read_chunk(
    path: str | os.PathLike[str],
    offset: int,
    *,
    records: int | None = None,
    number: int | None = None,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
) -> Chunk:
    """One chunk of a file (`RecordFile.chunk_at`); opens and closes the file, so any thread may call it."""
    with RecordFile(path, max_chunk_bytes=max_chunk_bytes) as file:
        return file.chunk_at(offset, records=records, number=number)
