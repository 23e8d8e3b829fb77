"""Frames: what a body must look like, and every way in which one may not."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Iterable
from typing import Any

import numpy as np
import pytest

from p2pnode.overlay.transport import Buffer
from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.encoding.frames import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    BadFrame,
    FrameReader,
    Part,
    blob_framed_bytes,
    blob_frames,
    encoded_frames,
    framed_bytes,
    frames,
    header,
    new_memory,
    read_array,
    read_blob,
    read_encoded,
)
from p2pnode.training.encoding.table import CODECS, NAMES, CodecName
from tests.harness.runner.stories import run_by

SHARD = 7


async def stream(buffers: Iterable[Buffer]) -> AsyncIterator[Buffer]:
    for buffer in buffers:
        yield buffer


def read(buffers: Iterable[Buffer], size: int, shard: int = SHARD, part: Part = Part.DELTA) -> tuple[Any, ...]:
    return asyncio.run(read_array(FrameReader(stream(buffers)), shard, part, size))


def head(offset: int = 0, payload_bytes: int = 8, codec: CodecName = "float32", **other: int) -> bytes:
    part = Part(other.get("part", Part.DELTA))
    return header(other.get("shard", SHARD), offset, payload_bytes, codec, part, step=3, version=4)


def ramp(size: int) -> Vector:
    return (np.arange(size) % 256).astype(np.float32)


def as_sent(values: Vector, codec: CodecName) -> Vector:
    """The values as the codec rounds them."""
    into = np.empty_like(values)
    codecs.decode(codecs.encode(values, codec), codec, into)
    return into


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [1, 2, 3, 262_143, 262_144, 262_145, 600_001])
def test_an_array_survives_its_frames(codec: CodecName, size: int) -> None:
    """Values, payload and codec come back whole, over one frame or several, at and around the cut."""
    values = ramp(size)

    read_back, encoded, found = read(frames(SHARD, values, codec, Part.DELTA), size)

    assert np.array_equal(read_back, as_sent(values, codec))
    assert bytes(encoded) == codecs.encode(values, codec)
    assert found == codec


@pytest.mark.parametrize("codec", CODECS)
def test_encoded_frames_are_the_same_on_the_wire(codec: CodecName) -> None:
    """A payload that is encoded already gives the very bytes that encoding on the way gives."""
    values = ramp(700_000)
    payload = codecs.encode(values, codec)

    fresh = b"".join(frames(SHARD, values, codec, Part.DELTA, step=2, version=9))
    repeated = b"".join(encoded_frames(SHARD, payload, codec, Part.DELTA, step=2, version=9))

    assert fresh == repeated


def test_frames_are_at_most_a_mebibyte() -> None:
    """Each payload fits the limit, and only the last is shorter."""
    buffers = list(frames(SHARD, ramp(600_001), "float32", Part.VALUE))
    sizes = [len(payload) for payload in buffers[1::2]]

    assert all(len(raw) == HEADER_BYTES for raw in buffers[::2])
    assert sizes == [MAX_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES, 4 * 600_001 - 2 * MAX_PAYLOAD_BYTES]


def test_the_header_on_the_wire() -> None:
    """Golden bytes: 32, little-endian, in the documented order."""
    raw = header(0x01020304, 5, 6, "bfloat16", Part.PENDING, step=-1, version=2**63, sequence=9)

    assert raw.hex() == "0403020105000000060000000104" + "0900" + "ff" * 8 + "0000000000000080"
    assert len(raw) == HEADER_BYTES == 32


def test_the_parts_never_change_their_numbers() -> None:
    """The numbers of the parts are protocol."""
    assert [(part.name, int(part)) for part in Part] == [
        ("DELTA", 0),
        ("VALUE", 1),
        ("MOMENTUM", 2),
        ("PENDING", 4),
        ("CHANGE", 5),
        ("BATCH", 7),
        ("TABLE", 8),
        ("UPDATES", 9),
        ("RECORD", 10),
    ]


@run_by(asyncio.run)
async def test_the_values_do_not_share_memory_with_the_transport() -> None:
    """A transport may reuse its buffer the moment the next one is requested."""
    values = ramp(4)
    buffer = bytearray(b"".join(frames(SHARD, values, "float32", Part.DELTA)))
    read_back, encoded, _ = await read_array(FrameReader(stream([buffer])), SHARD, Part.DELTA, 4)
    buffer[:] = bytes(len(buffer))
    assert np.array_equal(read_back, values)
    assert bytes(encoded) == codecs.encode(values, "float32")


@pytest.mark.parametrize("codec", CODECS)
def test_a_body_cut_anywhere_is_a_bad_frame(codec: CodecName) -> None:
    """However many bytes of a two-frame array arrive, fewer than all is `BadFrame`, never a shorter array."""
    first = max(3, CODECS[codec].block_values)
    values = ramp(first + 3)
    payloads = [bytes(codecs.encode(part, codec)) for part in (values[:first], values[first:])]
    offsets = [0, first]
    whole = b"".join(
        piece
        for offset, payload in zip(offsets, payloads, strict=True)
        for piece in (head(offset, len(payload), codec), payload)
    )
    assert np.array_equal(read([whole], values.size)[0], as_sent(values, codec))

    for kept in range(len(whole)):
        with pytest.raises(BadFrame):
            read([whole[:kept]], values.size)


def test_an_int8_array_cut_inside_a_block_is_a_bad_frame() -> None:
    """A short frame before the last would begin the next block in the middle of one."""
    payload = codecs.encode(ramp(3), "int8")

    with pytest.raises(BadFrame, match="neither whole blocks nor 6 values"):
        read([head(0, len(payload), "int8"), payload, head(3, len(payload), "int8"), payload], 6)


@pytest.mark.parametrize(
    ("buffers", "reason"),
    [
        ([], "missing"),
        ([b""], "missing"),
        ([head(shard=SHARD + 1), bytes(8)], "expected shard 7"),
        ([head(part=Part.VALUE), bytes(8)], "expected shard 7"),
        ([head(offset=1), bytes(8)], "from value 0"),
        ([head(payload_bytes=4), bytes(4), head(offset=0, payload_bytes=4), bytes(4)], "from value 1"),
        ([head(payload_bytes=4), bytes(4), head(offset=2, payload_bytes=4), bytes(4)], "from value 1"),
        ([head(payload_bytes=12), bytes(12)], "2 values"),
        ([head(payload_bytes=4), bytes(4), head(offset=1), bytes(8)], "nor 1 values"),
        ([head(payload_bytes=0)], "brings nothing"),
        ([head(payload_bytes=7), bytes(7)], "7 bytes"),
        ([head(payload_bytes=3, codec="bfloat16"), bytes(3)], "3 bytes"),
        ([head(payload_bytes=3, codec="int8"), bytes(3)], "3 bytes"),
        ([head(payload_bytes=MAX_PAYLOAD_BYTES + 1), bytes(MAX_PAYLOAD_BYTES + 1)], str(MAX_PAYLOAD_BYTES + 1)),
        ([head(payload_bytes=0xFFFFFFFF)], "4294967295"),
    ],
    ids=[
        "no body",
        "an empty buffer",
        "another shard",
        "another part",
        "begins late",
        "overlaps",
        "leaves a gap",
        "too long",
        "too long in the second frame",
        "an empty frame",
        "half a float32",
        "half a bfloat16",
        "a part of an int8 block's scale",
        "over a mebibyte",
        "four gibibytes announced",
    ],
)
def test_a_body_that_is_not_what_was_announced(buffers: list[bytes], reason: str) -> None:
    """Every disagreement with the head is a `BadFrame` that names it."""
    with pytest.raises(BadFrame, match=reason):
        read(buffers, 2)


def test_a_sparse_frame_is_bounded_by_its_values() -> None:
    """A frame that announces more bytes than its values can have is refused before memory is allocated for it."""
    allocated: list[int] = []

    def allocate(size_bytes: int) -> memoryview:
        allocated.append(size_bytes)
        return new_memory(size_bytes)

    async def scenario(payload_bytes: int) -> None:
        body = stream([head(payload_bytes=payload_bytes, codec="sparse"), bytes(payload_bytes)])
        await read_encoded(FrameReader(body), SHARD, Part.DELTA, 100, allocate)

    most = codecs.arithmetic("sparse").max_bytes(100)
    with pytest.raises(BadFrame, match=f"{most + 1} bytes of sparse are more than 100 values need"):
        asyncio.run(scenario(most + 1))
    assert not allocated
    with pytest.raises(BadFrame, match="more blocks"):
        asyncio.run(scenario(most))
    assert allocated == [most]


@pytest.mark.parametrize("size", [1, 4096, 598_016, 598_017, 1_300_000])
def test_a_sparse_array_has_the_announced_size(size: int) -> None:
    """The body has as many bytes as `framed_bytes` says, in frames of at most 598,016 values."""
    values = np.random.default_rng(size).standard_normal(size).astype(np.float32)

    for is_last in (False, True):
        payload = codecs.encode_with_feedback(values, np.zeros_like(values), "sparse", is_last=is_last)
        buffers = list(encoded_frames(SHARD, payload, "sparse", Part.DELTA))
        assert sum(len(buffer) for buffer in buffers) == framed_bytes("sparse", size, len(payload))
        assert max(len(buffer) for buffer in buffers) <= MAX_PAYLOAD_BYTES
        read_back, encoded, _ = read(buffers, size)
        assert bytes(encoded) == bytes(payload)
        assert np.array_equal(read_back, codecs.decoded(payload, "sparse", size))


@pytest.mark.parametrize("damage", ["a flipped count", "an empty frame", "cut inside a block"])
def test_a_damaged_sparse_array_is_a_bad_frame(damage: str) -> None:
    """What could not be decoded is refused while it is read, so that no later reader has to."""
    values = ramp(8192)
    payload = bytearray(codecs.encode(values, "sparse"))
    if damage == "a flipped count":
        payload[0] ^= 1
    half = 100 if damage == "cut inside a block" else 0 if damage == "an empty frame" else 230
    parts = [payload[:half], payload[half:]]
    second = 0 if damage == "an empty frame" else 4096
    buffers = [head(0, half, "sparse"), parts[0], head(second, len(parts[1]), "sparse"), parts[1]]

    with pytest.raises(BadFrame):
        read(buffers, values.size)


def test_an_unknown_codec_is_a_bad_frame() -> None:
    """A codec number from the future, or from nowhere, is refused before its payload is read."""
    for number in (max(NAMES) + 1, 255):
        raw = struct.pack("<IIIBBHqQ", SHARD, 0, 8, number, Part.DELTA, 0, 0, 0)
        with pytest.raises(BadFrame, match=f"codec {number}"):
            read([raw], 2)


def test_one_array_has_one_codec() -> None:
    """An array whose frames change their codec cannot be forwarded under one codec: it is a bad frame."""
    mixed = [
        head(0, 4, "float32"),
        codecs.encode(ramp(1), "float32"),
        head(1, 2, "bfloat16"),
        codecs.encode(ramp(1), "bfloat16"),
    ]

    with pytest.raises(BadFrame):
        read(mixed, 2)


def test_an_error_of_the_transport_passes_through() -> None:
    """A broken stream is an error of the transport, not a bad frame: the peer is not at fault."""

    async def broken() -> AsyncIterator[Buffer]:
        yield head()[:10]
        raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError):
        asyncio.run(read_array(FrameReader(broken()), SHARD, Part.DELTA, 2))


class RecordingBody:
    """A body that fills memory directly, as one from a socket, and notes how many bytes each read wanted."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self.reads: list[int] = []

    def __aiter__(self) -> RecordingBody:
        return self

    async def __anext__(self) -> Buffer:
        raise AssertionError("read without a copy")

    async def read_into(self, target: memoryview) -> int:
        self.reads.append(len(target))
        piece, self._data = self._data[: len(target)], self._data[len(target) :]
        target[: len(piece)] = piece
        return len(piece)


@pytest.mark.parametrize(("codec", "size"), [("float32", 600_001), ("bfloat16", 524_289), ("int8", 1_100_000)])
def test_the_header_of_the_next_frame_comes_with_the_payload_before_it(codec: CodecName, size: int) -> None:
    """One read per frame of an array and one for its first header. The last one of an array ends with its last byte:
    what follows may be long in coming. The values are those of a reader that copies."""
    encoded = codecs.encode(ramp(size), codec)
    buffers = [bytes(one) for one in encoded_frames(SHARD, encoded, codec, Part.DELTA)]
    payloads = [len(one) for one in buffers[1::2]]
    body = RecordingBody(b"".join(buffers + [head(shard=8), bytes(8)]))
    reader = FrameReader(body)

    found, _ = asyncio.run(read_encoded(reader, SHARD, Part.DELTA, size))
    after = asyncio.run(reader.header())

    is_small = payloads[-1] < HEADER_BYTES  # no room for the header behind the payload before
    behind = [HEADER_BYTES * (not is_small)] * (len(payloads) - 1) + [0]
    between = [HEADER_BYTES] if is_small else []
    wanted = [
        HEADER_BYTES,
        payloads[0] + behind[0],
        *between,
        *(a + b for a, b in zip(payloads[1:], behind[1:], strict=True)),
    ]
    assert body.reads == [*wanted, HEADER_BYTES]
    assert bytes(found) == bytes(encoded)
    assert after is not None
    assert after.shard == 8


@pytest.mark.parametrize("left", [0, 1, HEADER_BYTES, HEADER_BYTES + 1])
def test_a_body_that_ends_where_another_frame_must_follow_is_a_bad_frame(left: int) -> None:
    """Also where the header of the frame that is missing was to be read along with the one before."""
    buffers = [bytes(one) for one in frames(SHARD, ramp(300_000), "float32", Part.DELTA)]
    body = RecordingBody(b"".join(buffers[:2]) + b"".join(buffers[2:])[:left])

    with pytest.raises(BadFrame, match="ended inside a frame"):
        asyncio.run(read_encoded(FrameReader(body), SHARD, Part.DELTA, 300_000))


def read_bytes(buffers: Iterable[Buffer], limit_bytes: int = 1 << 24) -> tuple[bytes, bool]:
    async def scenario() -> tuple[bytes, bool]:
        raw, is_last = await read_blob(FrameReader(stream(buffers)), SHARD, Part.BATCH, limit_bytes)
        return bytes(raw), is_last

    return asyncio.run(scenario())


@pytest.mark.parametrize("size", [1, MAX_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES + 1, 3 * MAX_PAYLOAD_BYTES])
def test_bytes_return_as_they_were(size: int) -> None:
    """In one frame or several, and their size on the wire is known before."""
    raw = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    buffers = list(blob_frames(SHARD, raw, Part.BATCH))
    assert read_bytes(buffers) == (raw, True)
    assert sum(map(len, buffers)) == blob_framed_bytes(size)
    assert read_bytes(blob_frames(SHARD, raw, Part.BATCH, is_last=False)) == (raw, False)


def test_more_bytes_than_allowed_are_not_read() -> None:
    """The limit holds for what the first frame announces, before memory is taken."""
    with pytest.raises(BadFrame, match="at most 99"):
        read_bytes(blob_frames(SHARD, b"x" * 100, Part.BATCH), 99)


@pytest.mark.parametrize(
    "buffers",
    [
        [],
        list(blob_frames(SHARD, b"abc", Part.TABLE)),
        list(blob_frames(SHARD + 1, b"abc", Part.BATCH)),
        [header(SHARD, 0, 0, "float32", Part.BATCH, step=1, version=3), b""],
        [header(SHARD, 0, 4, "float32", Part.BATCH, step=1, version=3), b"abcd"],
        [header(SHARD, 1, 2, "float32", Part.BATCH, step=1, version=3), b"bc"],
        [header(SHARD, 0, 2, "float32", Part.BATCH, step=1, version=3), b"ab"],
        [header(SHARD, 0, 3, "float32", Part.BATCH, step=1, version=3), b"a"],
    ],
)
def test_bytes_that_do_not_fit_their_frames_are_refused(buffers: list[bytes]) -> None:
    """Missing, of another part or shard, empty, too many, with a gap, too few, torn."""
    with pytest.raises(BadFrame):
        read_bytes(buffers)


def test_the_announced_size_is_checked_before_it_is_allocated() -> None:
    """A header that announces four gibibytes costs nothing: its payload is not read."""
    asked = []

    async def body() -> AsyncIterator[Buffer]:
        yield head(payload_bytes=0xFFFFFFFF)
        asked.append(True)
        yield bytes(8)

    with pytest.raises(BadFrame):
        asyncio.run(FrameReader(body()).header())
    assert not asked
