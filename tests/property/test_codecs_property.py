"""Codecs and frames over arbitrary values, arbitrary cuts of the stream, and arbitrary damage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pnode.overlay.transport import Buffer
from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.encoding.frames import (
    HEADER_BYTES,
    BadFrame,
    FrameReader,
    Part,
    encoded_frames,
    frames,
    header,
    read_array,
)
from p2pnode.training.encoding.table import CODECS, CodecName

FIXED = settings(derandomize=True, database=None, deadline=None, max_examples=80)

NAMES = st.sampled_from(list(CODECS))
FIXED_SIZES = st.sampled_from([name for name, codec in CODECS.items() if codec.has_fixed_size])
#: Those whose encoding may be cut after any value.
VALUE_BY_VALUE = st.sampled_from([name for name, codec in CODECS.items() if codec.block_values == 1])
BITS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
FINITE = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40)


def rounded(values: Vector, codec: CodecName = "bfloat16") -> Vector:
    into = np.empty_like(values)
    codecs.decode(codecs.encode(values, codec), codec, into)
    return into


async def cut(whole: bytes, places: Iterable[int]) -> AsyncIterator[Buffer]:
    """The bytes in pieces that end at the places, some of them empty, of every kind of buffer."""
    start = 0
    for number, place in enumerate([*sorted(place % (len(whole) + 1) for place in places), len(whole)]):
        piece = whole[start:place]
        yield (bytes, bytearray, memoryview)[number % 3](piece)
        start = place


# -- codecs -----------------------------------------------------------------------------------------------------------


@FIXED
@given(BITS)
def test_float32_keeps_every_bit(bits: list[int]) -> None:
    """Any 32 bits come back, also those that are no number."""
    values = np.array(bits, dtype=np.uint32).view(np.float32)
    into = np.empty_like(values)

    codecs.decode(codecs.encode(values, "float32"), "float32", into)

    assert np.array_equal(into.view(np.uint32), values.view(np.uint32))


@FIXED
@given(FINITE)
def test_bfloat16_is_the_nearest(numbers: list[float]) -> None:
    """No bfloat16 value is closer than the one chosen; of two equally close ones it is the even one."""
    values = np.array(numbers, dtype=np.float32)
    codes = np.frombuffer(codecs.encode(values, "bfloat16"), dtype="<u2").astype(np.int64)
    wide = values.astype(np.float64)

    def widened(at: np.ndarray) -> np.ndarray:
        result = (at.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
        # One step beyond the largest finite value: the rounding boundary to infinity.
        return np.where(np.isinf(result), np.copysign(2.0**128, result), result)

    distance = np.abs(widened(codes) - wide)
    for step in (-1, 1):
        magnitude = (codes & 0x7FFF) + step
        inside = (magnitude >= 0) & (magnitude <= 0x7F80)
        other = np.abs(widened(np.where(inside, (codes & 0x8000) | magnitude, codes)) - wide)
        assert (distance <= other).all()
        assert ((distance < other) | ~inside | (codes % 2 == 0)).all()


@FIXED
@given(FINITE)
def test_bfloat16_keeps_sign_order_and_size(numbers: list[float]) -> None:
    """Rounding is odd (−x to −y), monotone, and within 2⁻⁸ of every normal value that does not overflow."""
    values = np.sort(np.array(numbers, dtype=np.float32))
    result = rounded(values)

    assert np.array_equal(rounded(-values).view(np.uint32), (-result).view(np.uint32))
    assert (result[:-1] <= result[1:]).all()
    normal = (np.abs(values) >= np.finfo(np.float32).tiny) & np.isfinite(result)
    error = np.abs(result.astype(np.float64) - values)
    assert (error[normal] <= np.abs(values[normal].astype(np.float64)) * 2.0**-8).all()


@FIXED
@given(BITS)
def test_all_finite_is_what_numpy_says(bits: list[int]) -> None:
    """The quick proof never disagrees with looking at each value."""
    values = np.array(bits, dtype=np.uint32).view(np.float32)

    assert codecs.all_finite(values) == bool(np.isfinite(values).all())


@FIXED
@given(FIXED_SIZES, st.binary(max_size=64), st.integers(0, 16))
def test_decode_takes_exactly_its_bytes(codec: CodecName, data: bytes, size: int) -> None:
    """Any other number of bytes is `ValueError` and nothing else, and the target keeps its values."""
    into = np.full(size, 3.0, dtype=np.float32)
    fits = len(data) == CODECS[codec].size_bytes(size)
    try:
        codecs.decode(data, codec, into)
        raised = False
    except ValueError:
        raised = True

    assert raised is not fits
    assert fits or (into == 3.0).all()


# -- frames -----------------------------------------------------------------------------------------------------------

ARRAYS = st.lists(
    st.tuples(st.integers(1, 50), NAMES, st.sampled_from(list(Part)), st.integers(0, 4095)),
    min_size=1,
    max_size=5,
)


@FIXED
@given(ARRAYS, st.lists(st.integers(0, 2**16), max_size=30), st.integers(0, 2**32 - 1))
def test_a_stream_may_be_cut_anywhere(
    arrays: list[tuple[int, CodecName, Part, int]], cuts: list[int], seed: int
) -> None:
    """Arrays of several shards, codecs and parts come back whole, however TCP cuts their bytes."""
    rng = np.random.default_rng(seed)
    values = [rng.normal(size=size).astype(np.float32) for size, *_ in arrays]
    whole = b"".join(
        buffer
        for array, (_, codec, part, shard) in zip(values, arrays, strict=True)
        for buffer in frames(shard, array, codec, part)
    )

    async def scenario() -> None:
        reader = FrameReader(cut(whole, cuts))
        for array, (size, codec, part, shard) in zip(values, arrays, strict=True):
            read_back, encoded, found = await read_array(reader, shard, part, size)
            assert found == codec
            assert bytes(encoded) == codecs.encode(array, codec)
            assert np.array_equal(read_back, rounded(array, codec))
        assert await reader.header() is None

    asyncio.run(scenario())


@FIXED
@given(
    st.integers(1, 30),
    VALUE_BY_VALUE,
    st.lists(st.integers(1, 10), min_size=1, max_size=8),
    st.lists(st.integers(0, 999)),
)
def test_frames_of_any_length_make_one_array(size: int, codec: CodecName, lengths: list[int], cuts: list[int]) -> None:
    """A sender may use smaller frames than this node: the array and its payload are the same."""
    values = np.arange(size, dtype=np.float32)
    buffers, offset, turn = [], 0, 0
    while offset < size:
        piece = values[offset : offset + lengths[turn % len(lengths)]]
        payload = codecs.encode(piece, codec)
        buffers += [header(3, offset, len(payload), codec, Part.VALUE, step=0, version=0), payload]
        offset, turn = offset + piece.size, turn + 1

    read_back, encoded, _ = asyncio.run(read_array(FrameReader(cut(b"".join(buffers), cuts)), 3, Part.VALUE, size))

    assert np.array_equal(read_back, values)
    assert bytes(encoded) == codecs.encode(values, codec)


@FIXED
@given(st.integers(1, 20), NAMES, st.integers(0, 10**6), st.lists(st.integers(0, 999), max_size=5))
def test_a_stream_that_ends_early_is_a_bad_frame(size: int, codec: CodecName, kept: int, cuts: list[int]) -> None:
    """Fewer bytes than the array has, wherever they end, are never taken for the array."""
    whole = b"".join(frames(5, np.arange(size, dtype=np.float32), codec, Part.DELTA))
    torn = whole[: kept % len(whole)]
    try:
        asyncio.run(read_array(FrameReader(cut(torn, cuts)), 5, Part.DELTA, size))
        raised = False
    except BadFrame:
        raised = True

    assert raised


@FIXED
@given(st.binary(max_size=200), st.integers(1, 20))
def test_junk_is_a_bad_frame(junk: bytes, size: int) -> None:
    """Bytes from anywhere are refused as `BadFrame`: no other error reaches a handler."""
    try:
        asyncio.run(read_array(FrameReader(cut(junk, [])), 0, Part.DELTA, size))
        accepted = True
    except BadFrame:
        accepted = False

    assert not accepted or junk[:4] == bytes(4)


@FIXED
@given(st.integers(2, 12), VALUE_BY_VALUE, st.integers(0, 10**6), st.integers(1, 255))
def test_one_damaged_byte_is_refused_or_harmless(size: int, codec: CodecName, place: int, flip: int) -> None:
    """A flipped byte gives `BadFrame` or an array of the right size: never another error, never another length."""
    first = np.arange(size // 2, dtype=np.float32)
    second = np.arange(size - size // 2, dtype=np.float32)
    payloads = [codecs.encode(first, codec), codecs.encode(second, codec)]
    raw = bytearray()
    for offset, payload in ((0, payloads[0]), (first.size, payloads[1])):
        raw += header(5, offset, len(payload), codec, Part.DELTA, step=0, version=0) + payload
    raw[place % len(raw)] ^= flip
    try:
        values, encoded, _ = asyncio.run(read_array(FrameReader(cut(bytes(raw), [])), 5, Part.DELTA, size))
    except BadFrame:
        return

    assert values.shape == (size,)
    assert len(encoded) <= 4 * size


@FIXED
@given(st.integers(1, 40), NAMES)
def test_what_was_read_can_be_forwarded(size: int, codec: CodecName) -> None:
    """A backup reads from an owner's forward exactly what the owner read from the push."""
    values = np.linspace(-3, 3, size, dtype=np.float32)

    async def scenario() -> None:
        pushed = b"".join(frames(1, values, codec, Part.DELTA))
        owner, encoded, found = await read_array(FrameReader(cut(pushed, [HEADER_BYTES])), 1, Part.DELTA, size)
        forwarded = b"".join(encoded_frames(1, bytes(encoded), found, Part.DELTA))
        backup, again, _ = await read_array(FrameReader(cut(forwarded, [1])), 1, Part.DELTA, size)
        assert backup.tobytes() == owner.tobytes()
        assert again == encoded

    asyncio.run(scenario())
