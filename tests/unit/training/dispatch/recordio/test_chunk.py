"""Chunks of RecordIO: the bytes that another implementation wrote, and what no chunk may be."""

from __future__ import annotations

import gzip
import struct
import zlib

import pytest

from p2pnode.training import kernels
from p2pnode.training.dispatch.recordio.chunk import (
    HEADER_BYTES,
    SNAPPY_IDENTIFIER,
    Chunk,
    Compressor,
    MalformedChunk,
    OutputTooLarge,
    compress,
    decode,
    parse_header,
    record_ends,
)
from tests.harness.builders.recordio import encode

RECORDS = [b"Hello", b"World,", b"RecordIO!"]
PAYLOAD = bytes.fromhex("0500000048656c6c6f06000000576f726c642c090000005265636f7264494f21")
#: Written by the Go implementation: without a compressor, and with snappy (one uncompressed frame).
GOLDEN = bytes.fromhex("04030201148c74a1000000002000000003000000") + PAYLOAD
GOLDEN_SNAPPY = (
    bytes.fromhex("040302014c76a44b010000003200000003000000ff060000734e6150705901240000")
    + bytes.fromhex("2daf42ab")
    + PAYLOAD
)
#: The same records by the code of the Go writer (wangkuiyi/recordio), with golang/snappy 0.0.2, which makes a frame for
#: each write, and compress/gzip of Go 1.19, which ends a stream with an empty block.
GO_SNAPPY = bytes.fromhex(
    "04030201af2219b2010000005a00000003000000ff060000734e6150705901080000d9c69c4305000000010900008aeeb9be48656c6c6f0108"
    "00001c03ee5506000000010a0000629913bc576f726c642c01080000a5b1b5a709000000010d000097a1a5715265636f7264494f21"
)
GO_GZIP = bytes.fromhex(
    "040302012c7eef280200000038000000030000001f8b08000000000000ff62656060f048cdc9c96763606008cf2fca49d1e1646060084a4dce"
    "2f4af1f45704040000ffff148c74a120000000"
)
LIMIT = 1 << 20


def decoded(data: bytes, limit: int = LIMIT) -> Chunk:
    """The chunk in these bytes."""
    return decode(parse_header(data[:HEADER_BYTES]), data[HEADER_BYTES:], limit)


@pytest.fixture(params=["compiled", "loop"], autouse=True)
def _either_scan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything holds with and without a C compiler."""
    if request.param == "loop":
        monkeypatch.setattr(kernels, "COMPILED", None)


@pytest.mark.parametrize(
    "data", [GOLDEN, GOLDEN_SNAPPY, GO_SNAPPY, GO_GZIP], ids=["none", "snappy", "go-snappy", "go-gzip"]
)
def test_chunks_of_another_implementation_decode(data: bytes) -> None:
    """Bytes of the Go implementation are the three records that it was given, with each compressor."""
    chunk = decoded(data)

    assert list(chunk) == chunk.records() == RECORDS
    assert (len(chunk), chunk[0], chunk[-1], chunk[1:]) == (3, b"Hello", b"RecordIO!", RECORDS[1:])


def test_a_chunk_without_a_compressor_has_the_golden_bytes() -> None:
    """What is written without a compressor is byte for byte what the Go implementation writes."""
    assert encode(RECORDS, Compressor.NONE) == GOLDEN


def header(payload: bytes, compressor: int, records: int) -> bytes:
    """A header with the right checksum."""
    return struct.pack("<5I", 0x01020304, zlib.crc32(payload), compressor, len(payload), records)


def frame(kind: int, body: bytes) -> bytes:
    """A snappy stream of one frame."""
    return SNAPPY_IDENTIFIER + bytes([kind]) + len(body).to_bytes(3, "little") + body


@pytest.mark.parametrize(
    ("payload", "compressor", "records", "problem"),
    [
        (PAYLOAD, 0, 2, "the header says 2 records, and 13 bytes follow"),
        (PAYLOAD, 0, 4, "the header says 4 records, and the payload has room for 3"),
        (PAYLOAD[:-1], 0, 3, "record 2 of the chunk ends 1 bytes after the payload"),
        (PAYLOAD, 0, 9, "9 records in 32 bytes, which cannot hold them"),
        (b"x", 1, 6, "announces 6 records in 1 bytes"),
        (b"x", 2, 259, "announces 259 records in 1 bytes"),
        (b"xx", 1, 11, "not a snappy stream"),
        (b"x", 2, 258, "ends inside its gzip"),
        (PAYLOAD, 0, 0, "announces no record"),
        (PAYLOAD, 3, 3, "compressor 3 is unknown"),
        (PAYLOAD, 1, 3, "not a snappy stream"),
        (PAYLOAD, 2, 3, "not gzip"),
        (compress(PAYLOAD, Compressor.SNAPPY)[:-1], 1, 3, "ends inside a snappy frame"),
        (compress(PAYLOAD, Compressor.SNAPPY) + b"\x02\x00\x00\x00", 1, 3, "type 0x02, which nobody may skip"),
        (compress(PAYLOAD, Compressor.SNAPPY) + b"\x00\x00", 1, 3, "inside the head of a snappy frame"),
        (frame(0xFF, b"sNaPpX"), 1, 1, "of another format"),
        (frame(0x01, b"abc"), 1, 1, "announces -1 bytes"),
        (frame(0x01, bytes(4 + 65_537)), 1, 1, "announces 65537 bytes, and the format allows 65536"),
        (frame(0x00, bytes(4)), 1, 1, "has no length"),
        (frame(0x00, bytes(4) + b"\x80\x80\x80\x80\x80\x01"), 1, 1, "has no length"),
        (frame(0x00, bytes(4) + b"\xff\xff\xff\xff\x0f"), 1, 1, "announces 4294967295 bytes"),
        (frame(0x00, bytes(4) + b"\x80\x80\x04"), 1, 1, "not what its snappy frames announce"),
        (compress(PAYLOAD, Compressor.GZIP)[:-1], 2, 3, "ends inside its gzip stream"),
        (compress(PAYLOAD, Compressor.GZIP) + b"xx", 2, 3, "not gzip"),
    ],
)
def test_what_contradicts_itself_is_refused(payload: bytes, compressor: int, records: int, problem: str) -> None:
    """A chunk whose payload passes its checksum and contradicts the header, or itself, is an error that says how."""
    with pytest.raises(MalformedChunk, match=problem):
        decoded(header(payload, compressor, records) + payload)


def test_a_compressed_payload_is_not_read_as_records() -> None:
    """A gzip payload that is a valid record by chance is refused when a flipped bit makes the compressor "none"."""
    # The first four bytes of gzip, as the length of a record. Empty blocks of deflate fill the payload up to it.
    room = 0x00088B1F + 4
    inner = b"\x05\x00\x00\x00hello"
    packer = zlib.compressobj(0, zlib.DEFLATED, -15)
    body = packer.compress(inner) + packer.flush()
    head, trailer = b"\x1f\x8b\x08" + b"\x00" * 7, struct.pack("<II", zlib.crc32(inner), len(inner))
    filler = b"\x00\x00\x00\xff\xff" * ((room - len(head + body + trailer)) // 5)
    payload = head + filler + body + trailer
    assert gzip.decompress(payload) == inner
    assert list(record_ends(payload, 1)) == [room], "the payload must be one record by chance"

    with pytest.raises(MalformedChunk, match="says that the payload is not compressed, and it is gzip"):
        decoded(header(payload, 0, 1) + payload)
    assert decoded(header(payload, 2, 1) + payload).records() == [b"hello"]


@pytest.mark.parametrize("compressor", list(Compressor))
def test_more_than_the_limit_is_not_decompressed(compressor: Compressor) -> None:
    """A chunk that becomes a byte more than allowed is refused; at the limit it is read."""
    record = b"\x00" * 100_000
    data = encode([record], compressor)

    assert decoded(data, 100_004).records() == [record]
    with pytest.raises(OutputTooLarge):
        decoded(data, 100_003)


def test_frames_that_announce_too_much_are_not_looked_into() -> None:
    """A hundred frames of 12 bytes announce 6.5 MB: the limit counts before the damage that is in them."""
    payload = SNAPPY_IDENTIFIER + frame(0x00, bytes(4) + b"\x80\x80\x04")[len(SNAPPY_IDENTIFIER) :] * 100

    with pytest.raises(OutputTooLarge):
        decoded(header(payload, 1, 1) + payload)


def test_snappy_frames_that_nobody_needs_are_skipped() -> None:
    """Padding, skippable frames and repeated identifiers inside a snappy stream change nothing."""
    stream = compress(PAYLOAD, Compressor.SNAPPY)
    payload = stream[:10] + b"\xfe\x03\x00\x00abc" + b"\x80\x01\x00\x00x" + stream[:10] + stream[10:]

    assert decoded(header(payload, 1, 3) + payload).records() == RECORDS


def test_several_gzip_members_are_one_stream() -> None:
    """A payload of two gzip members is their contents one after the other, and has one limit."""
    payload = gzip.compress(PAYLOAD[:7], mtime=0) + gzip.compress(PAYLOAD[7:], mtime=0)

    assert decoded(header(payload, 2, 3) + payload).records() == RECORDS
    with pytest.raises(OutputTooLarge):
        decoded(header(payload, 2, 3) + payload, len(PAYLOAD) - 1)


def test_the_same_records_are_the_same_file() -> None:
    """Gzip has no time in it."""
    assert compress(PAYLOAD, Compressor.GZIP)[4:8] == bytes(4)


def test_records_of_one_length_are_a_matrix() -> None:
    """Records of equal length are an array without copies, and others are refused."""
    chunk = decoded(encode([b"abc", b"def"], Compressor.NONE))

    assert chunk.matrix().tolist() == [[97, 98, 99], [100, 101, 102]]
    assert chunk.matrix().base is not None
    with pytest.raises(ValueError, match="different lengths"):
        decoded(GOLDEN).matrix()
