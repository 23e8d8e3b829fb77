"""Payloads of chunks: what a snappy stream announces, limits before memory is taken, and damage by its clear error."""

from __future__ import annotations

import gzip

import pytest

from p2pnode.training.dispatch.recordio.compression import (
    SNAPPY_IDENTIFIER,
    OutputTooLarge,
    compress,
    decompress,
    snappy_bytes,
)
from p2pnode.training.dispatch.recordio.layout import Compressor, MalformedChunk

#: A chunk has a record, and its length: no payload is empty.
PAYLOADS = [b"x", b"ab" * 40_000, bytes(range(256)) * 600]


def frame(kind: int, body: bytes) -> bytes:
    return bytes([kind]) + len(body).to_bytes(3, "little") + body


@pytest.mark.parametrize("compressor", list(Compressor))
@pytest.mark.parametrize("payload", PAYLOADS, ids=len)
def test_a_payload_comes_back_at_its_limit_and_not_a_byte_below(compressor: Compressor, payload: bytes) -> None:
    """One byte, and more than one frame of snappy."""
    packed = compress(payload, compressor)

    assert decompress(packed, compressor, len(payload)) == payload
    with pytest.raises(OutputTooLarge):
        decompress(packed, compressor, len(payload) - 1)


def test_the_same_payload_is_the_same_file() -> None:
    """Gzip has no time in it, so that a file written again has the same bytes."""
    assert compress(b"record", Compressor.GZIP)[4:8] == b"\0\0\0\0"
    assert compress(b"record", Compressor.NONE) == b"record"


@pytest.mark.parametrize("payload", PAYLOADS, ids=len)
def test_the_frames_of_snappy_announce_the_size(payload: bytes) -> None:
    """What the library writes is added up as it decompresses."""
    assert snappy_bytes(compress(payload, Compressor.SNAPPY)) == len(payload)


def test_frames_that_announce_nothing_are_passed_over() -> None:
    """Padding and skippable frames count nothing; an uncompressed frame counts its bytes without its checksum."""
    stream = SNAPPY_IDENTIFIER + frame(0xFE, bytes(9)) + frame(0x80, b"") + frame(0x01, bytes(4) + b"abc")

    assert snappy_bytes(stream + SNAPPY_IDENTIFIER) == 3


@pytest.mark.parametrize(
    ("stream", "problem"),
    [
        (b"", "does not begin with the identifier"),
        (SNAPPY_IDENTIFIER[:-1], "does not begin with the identifier"),
        (SNAPPY_IDENTIFIER + b"\0\1\0", "ends inside the head"),
        (SNAPPY_IDENTIFIER + b"\1\5\0\0abcd", "ends inside a snappy frame"),
        (SNAPPY_IDENTIFIER + frame(0x02, b"abcd"), "type 0x02, which nobody may skip"),
        (SNAPPY_IDENTIFIER + frame(0x7F, b"abcd"), "type 0x7f"),
        (SNAPPY_IDENTIFIER + frame(0xFF, b"sNaPpX"), "of another format"),
        (SNAPPY_IDENTIFIER + frame(0x01, b"abc"), "announces -1 bytes"),
        (SNAPPY_IDENTIFIER + frame(0x01, bytes(4 + 65_537)), "announces 65537 bytes, and the format allows 65536"),
        (SNAPPY_IDENTIFIER + frame(0x00, bytes(4)), "has no length"),
        (SNAPPY_IDENTIFIER + frame(0x00, bytes(4) + b"\x80\x80\x80\x80\x80\x01"), "has no length"),
        (SNAPPY_IDENTIFIER + frame(0x00, bytes(4) + b"\xff\xff\xff\xff\x0f"), "announces 4294967295 bytes"),
    ],
)
def test_a_damaged_snappy_stream_says_what_is_wrong(stream: bytes, problem: str) -> None:
    """Before anything is decompressed."""
    with pytest.raises(MalformedChunk, match=problem):
        snappy_bytes(stream)


def test_a_stream_that_announces_too_much_takes_no_memory() -> None:
    """A hundred frames announce 6.5 MB and have 12 bytes each: the limit is compared before they are looked into."""
    stream = SNAPPY_IDENTIFIER + frame(0x00, bytes(4) + b"\x80\x80\x04") * 100

    with pytest.raises(OutputTooLarge):
        decompress(stream, Compressor.SNAPPY, 1 << 20)
    with pytest.raises(MalformedChunk, match="not what its snappy frames announce"):
        decompress(stream, Compressor.SNAPPY, 1 << 23)


def test_gzip_members_share_one_limit() -> None:
    """Two members are one stream; the second may take what the first has left."""
    stream = gzip.compress(b"abc", mtime=0) + gzip.compress(b"defg", mtime=0)

    assert decompress(stream, Compressor.GZIP, 7) == b"abcdefg"
    with pytest.raises(OutputTooLarge):
        decompress(stream, Compressor.GZIP, 6)


@pytest.mark.parametrize(
    ("payload", "problem"),
    [(b"plain", "is not gzip"), (gzip.compress(b"abc", mtime=0)[:-1], "ends inside"), (b"\x1f", "ends inside")],
)
def test_what_is_no_gzip_says_so(payload: bytes, problem: str) -> None:
    """Other bytes, and a stream that is cut."""
    with pytest.raises(MalformedChunk, match=problem):
        decompress(payload, Compressor.GZIP, 100)
