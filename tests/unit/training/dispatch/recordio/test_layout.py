"""The header of a chunk: its bytes, and what it may not announce."""

from __future__ import annotations

import struct

import pytest

from p2pnode.training.dispatch.recordio.layout import (
    HEADER_BYTES,
    MAGIC,
    ChunkHeader,
    Compressor,
    MalformedChunk,
    parse_header,
)


def header(compressor: int = 0, payload_bytes: int = 8, records: int = 1, magic: int = MAGIC) -> bytes:
    return struct.pack("<5I", magic, 77, compressor, payload_bytes, records)


def test_a_header_comes_back_as_it_was() -> None:
    """Twenty bytes, little-endian."""
    for compressor in Compressor:
        found = ChunkHeader(77, compressor, 1000, 3)
        assert parse_header(found.encode()) == found
    assert ChunkHeader(1, Compressor.GZIP, 2, 3).encode().hex() == "0403020101000000020000000200000003000000"
    assert len(header()) == HEADER_BYTES == 20


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (header(magic=MAGIC + 1), "the magic number is 0x01020305 instead of 0x01020304"),
        (header(compressor=3), "compressor 3 is unknown"),
        (header(records=0), "announces no record"),
        (header(payload_bytes=7, records=2), "announces 2 records in 7 bytes"),
        (header(1, payload_bytes=1, records=6), "announces 6 records in 1 bytes"),
        (header(2, payload_bytes=1, records=259), "announces 259 records in 1 bytes"),
    ],
)
def test_what_a_header_alone_contradicts_is_refused(data: bytes, problem: str) -> None:
    """A record takes four bytes at least; compressed ones as many as they can become."""
    with pytest.raises(MalformedChunk, match=problem):
        parse_header(data)


@pytest.mark.parametrize(("compressor", "payload_bytes", "records"), [(0, 8, 2), (1, 2, 11), (2, 1, 258)])
def test_as_many_records_as_the_bytes_can_hold_are_believed(compressor: int, payload_bytes: int, records: int) -> None:
    """The payload decides then."""
    assert parse_header(header(compressor, payload_bytes, records)).records == records
