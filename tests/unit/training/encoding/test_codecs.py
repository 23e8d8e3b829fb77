"""float32, bfloat16, int8 and int4 on the wire: rounding, sizes, error feedback, nothing non-finite overlooked."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.codecs import CodecName, Vector

EXACT_ON_SMALL_INTEGERS: list[CodecName] = ["float32", "bfloat16"]
#: Those whose size depends on the number of values alone.
CODECS: list[CodecName] = ["float32", "bfloat16", "int8", "int4"]
LOSSY: list[CodecName] = ["bfloat16", "int8", "int4"]
#: The values of a block on which a codec is exact, if the last one is among them: whole multiples of its scale.
LARGEST: dict[CodecName, int] = {"float32": 127, "bfloat16": 127, "int8": 127, "int4": 7}


def round_trip(values: Vector, codec: CodecName) -> Vector:
    into = np.full(values.shape, np.nan, dtype=np.float32)
    codecs.decode(codecs.encode(values, codec), codec, into)
    return into


def finite_patterns() -> Vector:
    """Every upper half of a float32 with the lower halves around which rounding changes its mind."""
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    values = (upper[:, None] | lower[None, :]).ravel().view(np.float32)
    return values[np.isfinite(values)]


def test_bfloat16_rounds_as_torch_does() -> None:
    """Bit for bit torch's bfloat16, on all upper halves and every tie: nearest, ties to even, overflow to infinity."""
    torch = pytest.importorskip("torch")
    values = finite_patterns()

    ours = np.frombuffer(codecs.encode(values, "bfloat16"), dtype="<u2")

    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(ours, theirs)


def test_bfloat16_decodes_as_torch_does() -> None:
    """All 65,536 codes, infinities and NaN among them, decode to torch's float32 values."""
    torch = pytest.importorskip("torch")
    codes = np.arange(1 << 16, dtype="<u2")
    into = np.empty(codes.size, dtype=np.float32)

    codecs.decode(codes.tobytes(), "bfloat16", into)

    theirs = torch.from_numpy(codes.view(np.int16)).view(torch.bfloat16).to(torch.float32).numpy()
    assert np.array_equal(into, theirs, equal_nan=True)


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (1.0, 1.0),
        (-0.0, -0.0),
        (1.0 + 2**-8, 1.0),  # a tie: the even neighbour is below
        (1.0 + 3 * 2**-8, 1.0 + 2**-6),  # a tie: the even neighbour is above
        (1.0 + 2**-8 + 2**-20, 1.0 + 2**-7),
        (-(1.0 + 3 * 2**-8), -(1.0 + 2**-6)),
        (1.9999999, 2.0),  # the carry runs into the exponent
        (2.0**-149, 0.0),  # the smallest denormal
        (2.0**-133, 2.0**-133),  # bfloat16's own smallest denormal
        (2.0**-134, 0.0),  # half of it: a tie
    ],
)
def test_single_roundings(value: float, rounded: float) -> None:
    """Named cases of round-to-nearest-even, the sign of zero included."""
    result = round_trip(np.array([value], dtype=np.float32), "bfloat16")[0]

    assert result == rounded
    assert np.signbit(result) == np.signbit(np.float32(rounded))


def test_the_relative_error_is_at_most_two_to_the_minus_eight() -> None:
    """For every normal value below bfloat16's largest; denormals keep half of bfloat16's smallest step."""
    values = finite_patterns()
    largest = np.float32(3.3895314e38)
    values = values[np.abs(values) <= largest]

    error = np.abs(round_trip(values, "bfloat16").astype(np.float64) - values)

    normal = np.abs(values) >= np.finfo(np.float32).tiny
    assert (error[normal] <= np.abs(values[normal].astype(np.float64)) * 2.0**-8).all()
    assert (error[~normal] <= 2.0**-134).all()


def test_rounding_twice_changes_nothing_more() -> None:
    """What bfloat16 has rounded travels exactly: a forward repeats what the owner read."""
    once = round_trip(finite_patterns()[::7], "bfloat16")

    assert np.array_equal(round_trip(once, "bfloat16"), once)


def test_float32_is_exact_for_every_bit_pattern() -> None:
    """float32 keeps all bits, NaN payloads included."""
    bits = np.random.default_rng(3).integers(0, 1 << 32, size=4096, dtype=np.uint32)

    assert np.array_equal(round_trip(bits.view(np.float32), "float32").view(np.uint32), bits)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 1023, 65537])
def test_sizes_even_and_odd(codec: CodecName, size: int) -> None:
    """Any number of values travels, none included, in exactly its bytes."""
    # With the largest level in every block the scale is 1, and whole numbers are exact in every codec.
    largest = LARGEST[codec]
    values = np.arange(size, dtype=np.float32) % (largest + 1)
    values[:: codecs.cut_values(codec)] = largest

    encoded = codecs.encode(values, codec)

    assert len(encoded) == codecs.size_bytes(codec, size)
    assert codecs.count_values(codec, len(encoded)) == size + (codec == "int4" and size % 2)
    assert np.array_equal(round_trip(values, codec), values)


@pytest.mark.parametrize("codec", CODECS)
def test_a_strided_slice_is_encoded_in_its_order(codec: CodecName) -> None:
    """A view with gaps, or backwards, is encoded as the values it shows."""
    largest = LARGEST[codec]
    values = np.arange(64, dtype=np.float32) % (largest + 1)
    values[62:] = largest

    assert np.array_equal(round_trip(values[::2], codec), values[::2])
    assert np.array_equal(round_trip(values[::-1], codec), values[::-1])


@pytest.mark.parametrize("codec", CODECS)
def test_encoding_leaves_the_values_alone(codec: CodecName) -> None:
    """The trainer's own buffer is read, never written."""
    values = np.array([1.001, -2.003, 3e-40], dtype=np.float32)
    before = values.copy()
    values.flags.writeable = False

    codecs.encode(values, codec)

    assert np.array_equal(values, before)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("codec", EXACT_ON_SMALL_INTEGERS)
def test_decodes_from_every_kind_of_buffer_into_a_slice(codec: CodecName, kind: type) -> None:
    """What a transport hands over is decoded in place; the neighbours of the slice stay."""
    data = codecs.encode(np.array([1.0, 2.0, 3.0], dtype=np.float32), codec)
    whole = np.zeros(5, dtype=np.float32)

    codecs.decode(kind(data), codec, whole[1:4])

    assert whole.tolist() == [0.0, 1.0, 2.0, 3.0, 0.0]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("wrong", [-1, 1, 2, 4])
def test_a_wrong_number_of_bytes_is_refused_and_writes_nothing(codec: CodecName, wrong: int) -> None:
    """Too few, too many, or half a value: `ValueError`, and the target is as it was."""
    into = np.full(4, 9.0, dtype=np.float32)
    data = bytes(codecs.size_bytes(codec, 4) + wrong)

    with pytest.raises(ValueError, match=codec):
        codecs.decode(data, codec, into)

    assert (into == 9.0).all()


def test_the_wire_is_little_endian() -> None:
    """Golden bytes: 1.0 and −2.5 in each codec; the scales are 2.5 / 127 and 2.5 / 7, and int4's levels 3 and −7."""
    values = np.array([1.0, -2.5], dtype=np.float32)

    assert codecs.encode(values, "float32").hex() == "0000803f000020c0"
    assert codecs.encode(values, "bfloat16").hex() == "803f20c0"
    assert codecs.encode(values, "int8").hex() == np.float32(2.5 / 127).tobytes().hex() + "3381"
    assert codecs.encode(values, "int4").hex() == "b73e" + "93"


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1, 4999, 9999])
def test_one_bad_value_anywhere_is_seen(poison: float, place: int) -> None:
    """A single NaN or infinity among ten thousand values is found at any position."""
    values = np.ones(10_000, dtype=np.float32)
    values[place] = poison

    assert not codecs.all_finite(values)


def test_infinities_of_both_signs_do_not_cancel() -> None:
    """+∞ and −∞ together are not finite, and neither is ∞ beside zeros."""
    assert not codecs.all_finite(np.array([np.inf, -np.inf], dtype=np.float32))
    assert not codecs.all_finite(np.array([0.0, np.inf, 0.0], dtype=np.float32))


def test_finite_values_whose_squares_overflow_are_finite() -> None:
    """The fast proof fails for huge values; the slow test gives the right result, without a warning."""
    huge = np.full(1000, np.finfo(np.float32).max, dtype=np.float32)

    assert codecs.all_finite(huge)
    assert codecs.all_finite(-huge)
    huge[500] = np.nan
    assert not codecs.all_finite(huge)


def test_nothing_and_denormals_are_finite() -> None:
    """An empty array has no bad value; squares that vanish are no fault."""
    assert codecs.all_finite(np.empty(0, dtype=np.float32))
    assert codecs.all_finite(np.full(8, 1e-45, dtype=np.float32))


def test_the_codec_numbers_never_change() -> None:
    """The numbers are sent in frame headers: they are part of the protocol."""
    assert codecs.CODES == {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3, "sparse": 4}
    assert codecs.NAMES == {0: "float32", 1: "bfloat16", 2: "int8", 3: "int4", 4: "sparse"}


# -- int8 -------------------------------------------------------------------------------------------------------------


def test_int8_is_off_by_half_a_scale_at_most() -> None:
    """In each block of 1,024 the error is at most max|x| / 254, whatever the blocks' sizes are like."""
    random = np.random.default_rng(4)
    values = random.standard_normal(10_000).astype(np.float32)
    values *= np.repeat(10.0 ** random.integers(-20, 20, 10), 1000).astype(np.float32)

    error = np.abs(round_trip(values, "int8").astype(np.float64) - values)

    for start in range(0, values.size, codecs.BLOCK_VALUES):
        block = slice(start, start + codecs.BLOCK_VALUES)
        assert error[block].max() <= np.abs(values[block]).max() / 254 * (1 + 1e-5)


def test_an_outlier_spoils_its_own_block_alone() -> None:
    """One huge value: its block loses the small ones, the next block does not."""
    values = np.ones(2 * codecs.BLOCK_VALUES, dtype=np.float32)
    values[7] = 1e6

    back = round_trip(values, "int8")

    assert back[7] == pytest.approx(1e6)
    assert not back[8 : codecs.BLOCK_VALUES].any()
    assert np.allclose(back[codecs.BLOCK_VALUES :], 1.0)


@pytest.mark.parametrize("values", [0.0, 1e-38, 1e-45, -1e-31])
def test_blocks_of_nearly_nothing_are_zero(values: float) -> None:
    """A block too small for a scale decodes to zeros, without a warning; error feedback keeps what it held."""
    delta = np.full(5, values, dtype=np.float32)
    residual = np.zeros(5, dtype=np.float32)

    into = np.full(5, 9.0, dtype=np.float32)
    codecs.decode(codecs.encode_with_feedback(delta, residual, "int8"), "int8", into)

    assert not into.any()
    assert np.array_equal(residual, delta)


@pytest.mark.parametrize("size", [3, 1024, 3000])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("codec", LOSSY)
def test_what_is_not_finite_stays_so(codec: CodecName, poison: float, size: int) -> None:
    """A poisoned delta is still one when decoded, so that its owner refuses it; the residual keeps no poison."""
    delta = np.ones(size, dtype=np.float32)
    delta[size // 2] = poison
    residual = np.zeros(size, dtype=np.float32)
    into = np.zeros(size, dtype=np.float32)

    codecs.decode(codecs.encode_with_feedback(delta, residual, codec), codec, into)

    assert not codecs.all_finite(into)
    assert not residual.any()


@pytest.mark.parametrize(
    ("codec", "bytes_"),
    [("int8", 1), ("int8", 2), ("int8", 3), ("int8", 4), ("int8", 1028 + 1), ("int8", 1028 + 4)]
    + [("int4", 1), ("int4", 2), ("int4", 34 + 1), ("int4", 34 + 2)],
)
def test_a_cut_inside_a_block_is_no_number_of_values(codec: CodecName, bytes_: int) -> None:
    """A scale without values, or a part of a scale, is refused."""
    with pytest.raises(ValueError, match="inside a block"):
        codecs.count_values(codec, bytes_)


def test_int4_is_off_by_half_a_scale_at_most() -> None:
    """In each block of 64 the error is at most max|x| / 14, and the rounding of the scale to bfloat16."""
    random = np.random.default_rng(5)
    values = random.standard_normal(10_000).astype(np.float32)
    values *= np.repeat(10.0 ** random.integers(-20, 20, 100), 100).astype(np.float32)

    error = np.abs(round_trip(values, "int4").astype(np.float64) - values)

    for start in range(0, values.size, 64):
        block = slice(start, start + 64)
        assert error[block].max() <= np.abs(values[block]).max() / 14 * (1 + 2**-7)


# -- error feedback ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 1023, 1025, 70_001])
@pytest.mark.parametrize("codec", LOSSY)
def test_what_is_decoded_and_what_is_owed_make_up_the_delta(codec: CodecName, size: int) -> None:
    """decoded + residual after = delta + residual before, to float32's last digit; the delta is left alone."""
    random = np.random.default_rng(size)
    delta = random.standard_normal(size).astype(np.float32)
    residual = 0.01 * random.standard_normal(size).astype(np.float32)
    exact = delta + residual
    given = delta.copy()

    into = np.empty(size, dtype=np.float32)
    encoded = codecs.encode_with_feedback(delta, residual, codec)
    codecs.decode(encoded, codec, into)

    assert encoded == codecs.encode(exact, codec)
    np.testing.assert_allclose(into + residual, exact, rtol=0, atol=1e-6)
    assert np.array_equal(delta, given)


@pytest.mark.parametrize("codec", LOSSY)
def test_nothing_is_lost_over_many_deltas(codec: CodecName) -> None:
    """After a hundred deltas what arrived lacks only the residual, which is less than one rounding."""
    random = np.random.default_rng(9)
    residual = np.zeros(2000, dtype=np.float32)
    arrived, sent = np.zeros(2000), np.zeros(2000)
    for _ in range(100):
        delta = random.standard_normal(2000).astype(np.float32)
        into = np.empty_like(delta)
        codecs.decode(codecs.encode_with_feedback(delta, residual, codec), codec, into)
        arrived += into
        sent += delta

    np.testing.assert_allclose(arrived + residual, sent, rtol=0, atol=1e-3 if codec == "int4" else 1e-4)
    assert np.abs(residual).max() < 5.0 / {"bfloat16": 256, "int8": 127, "int4": 7}[codec]


@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf, 1.1e18, -1.1e18])
def test_an_encoded_value_out_of_range_is_found(codec: Literal["float32", "bfloat16"], bad: float) -> None:
    """Of either sign, wherever it is, and beside values whose sum of squares is too large to prove anything."""
    for size, place in ((1, 0), (40_000, 39_999), (100_001, 70_000)):
        values = np.linspace(-1e18, 1e18, size, dtype=np.float32)
        assert codecs.is_within(codecs.encode(values, codec), codec, 1.05e18)
        values[place] = bad
        bits = values if codec == "float32" else (values.view(np.uint32) >> 16).astype("<u2")
        assert not codecs.is_within(bits.tobytes(), codec, 1.05e18)
