"""What every codec of the table must do, and the bytes of each on the wire."""

from __future__ import annotations

import numpy as np
import pytest

from p2pnode.training import kernels
from p2pnode.training.encoding import codecs
from p2pnode.training.encoding.codecs import Vector
from p2pnode.training.encoding.sparse import DECAY
from p2pnode.training.encoding.table import CODECS, NAMES, RETIRED, CodecName

SIZES = [1, 2, 3, 7, 1023, 4097, 65_537]
every_codec = pytest.mark.parametrize("codec", CODECS)
fixed_size = pytest.mark.parametrize("codec", [name for name, codec in CODECS.items() if codec.has_fixed_size])


@pytest.fixture(params=["compiled", "numpy"], autouse=True)
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiled kernels, where there are some, and without."""
    if request.param == "numpy":
        monkeypatch.setattr(kernels, "COMPILED", None)


def random_values(size: int, seed: int = 1) -> Vector:
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32)


def round_trip(values: Vector, codec: CodecName) -> Vector:
    return codecs.decoded(codecs.encode(values, codec), codec, values.size)


# -- every codec of the table -----------------------------------------------------------------------------------------


def test_the_codec_numbers_never_change() -> None:
    """The numbers are sent in frame headers: they are part of the protocol, and none is given twice."""
    known = {0: "float32", 1: "bfloat16", 2: "int8", 3: "int4"}
    sparse = {4: "sparse", 5: "sparse64", 6: "sparse256", 7: "sparse512"}
    assert NAMES.items() >= (known | sparse).items()
    assert len(NAMES) == len(CODECS)
    assert not RETIRED & NAMES.keys()


@every_codec
def test_the_table_says_how_many_bytes_a_value_has(codec: CodecName) -> None:
    """Within 2 % of what random values encode to."""
    values = random_values(1 << 18)

    assert len(codecs.encode(values, codec)) / values.size == pytest.approx(CODECS[codec].bytes_per_value, rel=0.02)


@every_codec
@pytest.mark.parametrize("size", SIZES)
def test_what_is_decoded_and_what_is_owed_make_up_the_delta(codec: CodecName, size: int) -> None:
    """decoded + residual after = delta + residual before, to float32's last digit; the delta is left alone."""
    delta, residual = random_values(size), 0.01 * random_values(size, 2)
    exact = delta + residual * np.float32(DECAY if CODECS[codec].is_partial else 1.0)
    given = delta.copy()
    delta.flags.writeable = False

    encoded = codecs.encode_with_feedback(delta, residual, codec)

    assert encoded == codecs.encode(exact, codec)
    np.testing.assert_allclose(codecs.decoded(encoded, codec, size) + residual, exact, rtol=0, atol=1e-6)
    assert np.array_equal(delta, given)


@every_codec
@pytest.mark.parametrize("size", SIZES)
def test_an_encoding_is_cut_and_counted_at_its_blocks(codec: CodecName, size: int) -> None:
    """Each piece encodes its own values; a receiver counts them, and accepts neither more nor a part of a block."""
    unit = CODECS[codec].block_values
    values = random_values(size)
    encoded = memoryview(codecs.encode(values, codec))
    arithmetic = codecs.arithmetic(codec)
    assert len(encoded) <= arithmetic.max_bytes(size)
    assert not CODECS[codec].has_fixed_size or len(encoded) == CODECS[codec].size_bytes(size)

    done = 0
    for start, stop in arithmetic.cuts(encoded, unit):
        count = arithmetic.count_values(encoded[start:stop], size - done)
        assert count == min(unit, size - done)
        assert encoded[start:stop] == codecs.encode(values[done : done + count], codec)
        done += count
    assert done == size
    for wrong in (encoded[:-1], bytes(encoded) * 2):
        with pytest.raises(ValueError, match="sparse" if CODECS[codec].is_partial else codec):
            arithmetic.count_values(memoryview(wrong), size)


@every_codec
def test_a_slice_with_gaps_is_encoded_in_its_order(codec: CodecName) -> None:
    """A view with gaps, or backwards, is encoded as the values that it shows."""
    values = random_values(1000)

    for view in (values[::2], values[::-1]):
        assert codecs.encode(view, codec) == codecs.encode(view.copy(), codec)


@fixed_size
@pytest.mark.parametrize("wrong", [-1, 1, 2, 4])
def test_a_wrong_number_of_bytes_is_refused_and_writes_nothing(codec: CodecName, wrong: int) -> None:
    """Too few, too many, or half a value: `ValueError`, and the target is as it was."""
    into = np.full(4, 9.0, dtype=np.float32)

    with pytest.raises(ValueError, match="sparse" if CODECS[codec].is_partial else codec):
        codecs.decode(bytes(CODECS[codec].size_bytes(4) + wrong), codec, into)

    assert (into == 9.0).all()


@every_codec
@pytest.mark.parametrize("size", [3, 1024, 9000])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(codec: CodecName, poison: float, size: int) -> None:
    """A poisoned delta is still one when decoded, so that its owner refuses it; the residual keeps no poison."""
    delta, residual = np.ones(size, dtype=np.float32), np.ones(size, dtype=np.float32)
    delta[size // 2] = poison

    back = codecs.decoded(codecs.encode_with_feedback(delta, residual, codec), codec, size)

    assert not codecs.all_finite(back)
    assert not residual.any()


@every_codec
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_decodes_from_every_kind_of_buffer_into_a_slice(codec: CodecName, kind: type) -> None:
    """What a transport gives is decoded in place; the neighbours of the slice stay."""
    data = codecs.encode(np.full(3, 1.0, dtype=np.float32), codec)
    whole = np.full(5, 9.0, dtype=np.float32)

    codecs.decode(kind(data), codec, whole[1:4])

    assert whole[[0, 4]].tolist() == [9.0, 9.0]
    assert np.array_equal(whole[1:4], codecs.decoded(data, codec, 3))


@pytest.mark.parametrize("codec", [name for name, codec in CODECS.items() if codec.is_whole])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf, 1.1e18, -1.1e18])
def test_an_encoded_value_out_of_range_is_found(codec: CodecName, bad: float) -> None:
    """Of either sign, wherever it is, and beside values whose sum of squares is too large to prove anything."""
    arithmetic = codecs.arithmetic(codec)
    for size, place in ((1, 0), (40_000, 39_999), (100_001, 70_000)):
        values = np.linspace(-1e18, 1e18, size, dtype=np.float32)
        assert arithmetic.is_within(codecs.encode(values, codec), size, 1.05e18)
        values[place] = bad
        bits = (values.view(np.uint32) >> 16).astype("<u2") if codec == "bfloat16" else codecs.encode(values, codec)
        assert not arithmetic.is_within(bytes(bits), size, 1.05e18)


# -- each codec -------------------------------------------------------------------------------------------------------


def test_the_wire_is_little_endian() -> None:
    """Golden bytes: 1.0 and −2.5 in each codec; the scales are 2.5 / 127 and 2.5 / 7, and int4's levels 3 and −7."""
    values = np.array([1.0, -2.5], dtype=np.float32)

    assert codecs.encode(values, "float32").hex() == "0000803f000020c0"
    assert codecs.encode(values, "bfloat16").hex() == "803f20c0"
    assert codecs.encode(values, "int8").hex() == np.float32(2.5 / 127).tobytes().hex() + "3381"
    assert codecs.encode(values, "int4").hex() == "b73e" + "93"


def test_two_levels_of_int4_share_a_byte() -> None:
    """The first half of a block is in the lower halves of its bytes, the second in the upper ones."""
    values = np.zeros(64, dtype=np.float32)
    values[[0, 1, 32, 33]] = [7.0, -1.0, 2.0, -7.0]

    data = bytes(codecs.encode(values, "int4"))

    assert data.hex() == "803f" + "27" + "9f" + "00" * 30
    assert codecs.encode(np.float32([1.0, 2.0, 7.0]), "int4").hex() == "803f" + "71" + "02"
    assert np.array_equal(codecs.decoded(data, "int4", 64), values)


def test_float32_is_exact_for_every_bit_pattern() -> None:
    """float32 keeps all bits, NaN payloads included."""
    bits = np.random.default_rng(3).integers(0, 1 << 32, size=4096, dtype=np.uint32)

    assert np.array_equal(round_trip(bits.view(np.float32), "float32").view(np.uint32), bits)


def test_bfloat16_rounds_as_torch_does() -> None:
    """Bit for bit, on all upper halves and every tie; and all 65,536 codes decode to torch's values."""
    torch = pytest.importorskip("torch")
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    values = (upper[:, None] | lower[None, :]).ravel().view(np.float32)
    values = values[np.isfinite(values)]
    codes = np.arange(1 << 16, dtype="<u2")

    ours = np.frombuffer(codecs.encode(values, "bfloat16"), dtype="<u2")
    decoded = codecs.decoded(codes.tobytes(), "bfloat16", codes.size)

    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(ours, theirs)
    theirs = torch.from_numpy(codes.view(np.int16)).view(torch.bfloat16).to(torch.float32).numpy()
    assert np.array_equal(decoded, theirs, equal_nan=True)


@pytest.mark.parametrize(("codec", "levels"), [("int8", 127), ("int4", 7)])
def test_levels_are_off_by_half_a_scale_at_most(codec: CodecName, levels: int) -> None:
    """In each block, whatever the blocks' sizes are like; the scale of int4 is itself rounded to bfloat16."""
    random = np.random.default_rng(4)
    values = random_values(10_000) * np.repeat(10.0 ** random.integers(-20, 20, 100), 100).astype(np.float32)
    block_values = CODECS[codec].block_values

    error = np.abs(round_trip(values, codec).astype(np.float64) - values)

    for start in range(0, values.size, block_values):
        block = slice(start, start + block_values)
        assert error[block].max() <= np.abs(values[block]).max() / (2 * levels) * (1 + 2**-7)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_blocks_of_nearly_nothing_are_zero(codec: CodecName) -> None:
    """A block too small for a scale decodes to zeros, without a warning; error feedback keeps its values."""
    for value in (0.0, 1e-38, 1e-45, -1e-31):
        delta, residual = np.full(5, value, dtype=np.float32), np.zeros(5, dtype=np.float32)

        data = codecs.encode_with_feedback(delta, residual, codec)

        assert not codecs.decoded(data, codec, 5).any()
        assert np.array_equal(residual, delta)


# -- all_finite -------------------------------------------------------------------------------------------------------


def test_one_bad_value_anywhere_is_seen() -> None:
    """NaN and infinities of either sign, alone or together, also beside squares that overflow."""
    huge = np.full(1000, np.finfo(np.float32).max, dtype=np.float32)
    assert codecs.all_finite(huge)
    assert codecs.all_finite(np.empty(0, dtype=np.float32))
    assert codecs.all_finite(np.full(8, 1e-45, dtype=np.float32))
    assert not codecs.all_finite(np.array([np.inf, -np.inf], dtype=np.float32))
    for values in (np.ones(10_000, dtype=np.float32), huge):
        for place in (0, 1, 499, values.size - 1):
            for poison in (np.nan, np.inf, -np.inf):
                bad = values.copy()
                bad[place] = poison
                assert not codecs.all_finite(bad)
